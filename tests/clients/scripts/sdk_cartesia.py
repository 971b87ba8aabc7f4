"""cartesia: its WebSocket client, a context for each turn."""

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version

from cartesia import AsyncCartesia
from common import Order, Report, converse, pieces

OUTPUT = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24000}


async def main() -> None:
    order = Order()
    client = AsyncCartesia(api_key="none", base_url=order.url, websocket_base_url=order.url.replace("http", "ws", 1))
    known = [voice.id async for voice in await client.voices.list()]
    assert order.voice in known, known
    async with client.tts.websocket_connect() as socket:

        async def speak(text: str) -> AsyncIterator[tuple[bytes, int]]:
            context = socket.context(
                model_id="sonic-3", voice={"mode": "id", "id": order.voice}, output_format=OUTPUT, language="en"
            )
            is_whole = False
            try:
                for piece in pieces(text):
                    await context.push(piece)
                await context.no_more_inputs()
                async for event in context.receive():
                    if event.type == "chunk" and event.audio:
                        yield event.audio, 24000
                is_whole = True
            finally:
                if not is_whole:
                    await context.cancel()

        await converse(order, Report(order, {"cartesia": version("cartesia")}), speak)


asyncio.run(main())
