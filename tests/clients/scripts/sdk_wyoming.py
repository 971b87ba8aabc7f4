"""wyoming: its client, as Home Assistant asks, through `talkray wyoming`."""

import asyncio
import socket
from collections.abc import AsyncIterator
from importlib.metadata import version

from common import Order, Report, converse, pieces
from wyoming.audio import AudioChunk
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart, SynthesizeStop, SynthesizeStopped, SynthesizeVoice


async def main() -> None:
    order = Order()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sidecar = await asyncio.create_subprocess_exec(
        order.python, "-m", "serve_app", "wyoming", order.url, "--port", str(port)
    )
    try:
        async with asyncio.timeout(60):
            while not await _answers(port):
                assert sidecar.returncode is None, "the sidecar has ended"
                await asyncio.sleep(0.1)

        async def speak(text: str) -> AsyncIterator[tuple[bytes, int]]:
            async with AsyncTcpClient("127.0.0.1", port) as client:
                await client.write_event(SynthesizeStart(voice=SynthesizeVoice(name=order.voice)).event())
                for piece in pieces(text):
                    await client.write_event(SynthesizeChunk(piece).event())
                await client.write_event(Synthesize(text).event())
                await client.write_event(SynthesizeStop().event())
                while not SynthesizeStopped.is_type((event := await client.read_event()).type):
                    assert not Error.is_type(event.type), event.data
                    if AudioChunk.is_type(event.type):
                        chunk = AudioChunk.from_event(event)
                        yield chunk.audio, chunk.rate

        await converse(order, Report(order, {"wyoming": version("wyoming")}), speak)
    finally:
        sidecar.terminate()
        await sidecar.wait()


async def _answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


asyncio.run(main())
