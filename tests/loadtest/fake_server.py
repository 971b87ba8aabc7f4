"""A speech server without a model: `python -m tests.loadtest.fake_server PORT`. It measures what the client can do."""

import asyncio
import sys

from aiohttp import web

FRAME = b"\x00\x40" * 1920  # 80 ms at 24 kHz
FRAME_S = 0.08
RAMP = (1, 2, 4, 8)
STEADY = 12
RTF = 0.4


async def speak(request: web.Request) -> web.StreamResponse:
    """As many frames as asked for, in chunks that grow, faster than playback."""
    frames = int((await request.json()).get("max_new_tokens", 72)) - 1
    response = web.StreamResponse(headers={"Content-Type": "audio/pcm"})
    await response.prepare(request)
    sizes = iter(RAMP)
    while frames > 0:
        size = min(next(sizes, STEADY), frames)
        await asyncio.sleep(size * FRAME_S * RTF)
        await response.write(FRAME * size)
        frames -= size
    return response


def main() -> None:
    """Serve until Ctrl-C."""
    app = web.Application()
    app.router.add_post("/v1/audio/speech", speak)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
