"""openai: as its documentation shows streaming."""

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version

from common import Order, Report, converse
from openai import AsyncOpenAI


async def main() -> None:
    order = Order()
    client = AsyncOpenAI(base_url=f"{order.url}/v1", api_key="none")

    async def speak(text: str) -> AsyncIterator[tuple[bytes, int]]:
        asked = {"model": "tts-1", "voice": order.voice, "input": text, "response_format": "pcm"}
        async with client.audio.speech.with_streaming_response.create(**asked) as response:
            async for pcm in response.iter_bytes(4096):
                yield pcm, 24000

    await converse(order, Report(order, {"openai": version("openai")}), speak)


asyncio.run(main())
