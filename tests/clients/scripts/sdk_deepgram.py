"""deepgram-sdk: its WebSocket client, v1 and Flux."""

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version

from common import Order, Report, converse, pieces
from deepgram import AsyncDeepgramClient
from deepgram.environment import DeepgramClientEnvironment
from deepgram.speak.v1.types import SpeakV1Text


async def main() -> None:
    order = Order()
    sockets = order.url.replace("http", "ws", 1)
    at = DeepgramClientEnvironment(base=order.url, production=sockets, agent=sockets, agent_rest=order.url)
    client = AsyncDeepgramClient(api_key="none", environment=at)
    async with client.speak.v1.connect(model=order.voice, encoding="linear16", sample_rate="24000") as socket:

        async def speak(text: str) -> AsyncIterator[tuple[bytes, int]]:
            is_whole = False
            try:
                for piece in pieces(text):
                    await socket.send_text(SpeakV1Text(text=piece))
                await socket.send_flush()
                async for message in socket:
                    if isinstance(message, bytes):
                        yield message, 24000
                    elif message.type == "Flushed":
                        is_whole = True
                        return
            finally:
                if not is_whole:
                    await socket.send_clear()
                    async for message in socket:
                        if not isinstance(message, bytes) and message.type == "Cleared":
                            break

        await converse(order, Report(order, {"deepgram-sdk": version("deepgram-sdk")}), speak)


asyncio.run(main())
