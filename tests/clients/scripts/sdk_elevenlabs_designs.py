"""elevenlabs: a voice from a description, as its documentation shows: previews, and a voice made of one."""

import asyncio
import base64
import sys

from elevenlabs.client import AsyncElevenLabs

WORDS, TEXT = "A calm old man with a deep voice", "So it is, and so it has always been."


async def main(url: str) -> None:
    client = AsyncElevenLabs(base_url=url, api_key="none")
    before = await client.text_to_voice.create_previews(voice_description=WORDS, auto_generate_text=True)
    assert before.text, before
    designed = await client.text_to_voice.design(voice_description=WORDS, text=TEXT, model_id="eleven_ttv_v3", seed=7)
    assert (designed.text, len(designed.previews)) == (TEXT, 3)
    chosen = designed.previews[1]
    assert (chosen.media_type, bool(base64.b64decode(chosen.audio_base_64))) == ("audio/mpeg", True)
    streamed = await client.text_to_voice.design(voice_description=WORDS, text=TEXT, stream_previews=True)
    parts = client.text_to_voice.preview.stream(generated_voice_id=streamed.previews[0].generated_voice_id)
    assert b"".join([part async for part in parts])[:4] == b"fLaC"
    voice = await client.text_to_voice.create(
        voice_name="grandpa",
        voice_description=WORDS,
        generated_voice_id=chosen.generated_voice_id,
        labels={"language": "en"},
        played_not_selected_voice_ids=[designed.previews[0].generated_voice_id],
    )
    assert (voice.name, voice.labels) == ("grandpa", {"language": "en", "gender": ""}), voice
    assert voice.voice_id in [each.voice_id for each in (await client.voices.search()).voices]
    audio = client.text_to_speech.convert(voice_id=voice.voice_id, text="Good evening.", output_format="pcm_24000")
    assert b"".join([part async for part in audio])
    await client.voices.delete(voice.voice_id)


asyncio.run(main(sys.argv[1]))
