"""elevenlabs: text over HTTP, as its documentation shows streaming."""

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version

from common import Order, Report, converse
from elevenlabs.client import AsyncElevenLabs


async def main() -> None:
    order = Order()
    client = AsyncElevenLabs(base_url=order.url, api_key="none")
    known = await client.voices.search()
    assert order.voice in [voice.voice_id for voice in known.voices], known

    async def speak(text: str) -> AsyncIterator[tuple[bytes, int]]:
        async for pcm in client.text_to_speech.stream(
            voice_id=order.voice, text=text, model_id="eleven_turbo_v2_5", output_format="pcm_24000"
        ):
            yield pcm, 24000

    await converse(order, Report(order, {"elevenlabs": version("elevenlabs")}), speak)


asyncio.run(main())
