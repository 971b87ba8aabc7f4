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
    await hear_the_end(client, order)
    await keep_a_voice(client, (order.folder / "turn-0.wav").read_bytes())


async def hear_the_end(client: AsyncElevenLabs, order: Order) -> None:
    """Its types take the field of the last line that says how speech ended."""
    lines = [
        line
        async for line in client.text_to_speech.stream_with_timestamps(
            voice_id=order.voice, text=order.texts[0], model_id="eleven_turbo_v2_5", output_format="pcm_24000"
        )
    ]
    assert all(line.audio_base_64 for line in lines[:-1])
    assert "".join(char for line in lines if line.alignment for char in line.alignment.characters).strip()
    assert (lines[-1].audio_base_64, lines[-1].finish_reason) == ("", "stop")


async def keep_a_voice(client: AsyncElevenLabs, recording: bytes) -> None:
    """Create, list, rename and delete one; speaking with it takes a Base checkpoint."""
    made = await client.voices.ivc.create(name="kept", files=[("kept.wav", recording)])
    assert (made.voice_id, "cloned") in [(one.voice_id, one.category) for one in (await client.voices.search()).voices]
    await client.voices.update(voice_id=made.voice_id, name="renamed")
    assert (await client.voices.get(made.voice_id)).name == "renamed"
    await client.voices.delete(made.voice_id)
    assert made.voice_id not in [each.voice_id for each in (await client.voices.search()).voices]


asyncio.run(main())
