"""openai: a voice that is stored with what it says, spoken with, and deleted; and one that is made of a prompt."""

import asyncio
import io
import sys
import wave

from openai import AsyncOpenAI, NotFoundError


def recording() -> bytes:
    """Four seconds of a rising tone."""
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(24_000)
        samples = (8000 if number * (100 + number // 2400) // 12_000 % 2 else -8000 for number in range(96_000))
        audio.writeframes(b"".join(sample.to_bytes(2, "little", signed=True) for sample in samples))
    return file.getvalue()


async def main(url: str) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    file = ("kept.wav", recording(), "audio/wav")
    consents = client.audio.voice_consents
    consent = await consents.create(name="agreed", language="en-US", recording=file)
    assert consent.id in [each.id async for each in consents.list()]
    assert (await consents.update(consent.id, name="renamed")).name == "renamed"
    voice = await client.audio.voices.create(
        name="kept", audio_sample=file, consent=consent.id, extra_body={"ref_text": "It rises, and rises."}
    )
    for named in ("kept", {"id": voice.id}):
        answer = await client.audio.speech.create(
            model="gpt-4o-mini-tts", voice=named, input="Good evening.", response_format="pcm"
        )
        assert answer.content
    assert (await client.audio.voices.delete(voice.id)).deleted
    error = None
    try:
        await client.audio.speech.create(model="gpt-4o-mini-tts", voice={"id": voice.id}, input="Good evening.")
    except NotFoundError as raised:
        error = raised
    assert error is not None, "a deleted voice speaks"
    assert voice.id in error.message, error
    assert (await consents.delete(consent.id)).deleted
    made = await client.audio.voices.create(
        type="prompt", name="made", prompt="A calm old man.", script_hint="So it is."
    )
    assert (made.type, made.prompt, made.name) == ("prompt", "A calm old man.", "made")
    answer = await client.audio.speech.create(
        model="gpt-4o-mini-tts", voice={"id": made.id}, input="Good night.", response_format="pcm"
    )
    assert answer.content


asyncio.run(main(sys.argv[1]))
