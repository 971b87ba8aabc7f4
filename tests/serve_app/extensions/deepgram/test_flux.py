import asyncio
from functools import partial

import pytest

from tests.serve_app import fake
from tests.serve_app.extensions.client import Json, heard, talking

pytestmark = pytest.mark.anyio

# As LiveKit's plugin asks.
PATH = "/v2/speak?encoding=linear16&model=flux-ryan-en&sample_rate=24000&mip_opt_out=false"
FLUSH, CLOSE, INTERRUPT = {"type": "Flush"}, {"type": "Close"}, {"type": "Interrupt"}
FRAME = fake.tone(fake.CUSTOM_VOICE.frame_samples)
NO_CONTROLS = {"pronunciations_applied": 0, "breaks_applied": 0, "pronunciation_warnings": 0}


def speak(text: str) -> Json:
    return {"type": "Speak", "text": text}


def at(value_ms: int) -> Json:
    return {**INTERRUPT, "playback_offset": {"type": "time_ms", "value": value_ms}}


connected = partial(talking, greeting="Connected")


async def test_turns_have_a_beginning_and_an_end() -> None:
    synthesizer = fake.FakeSynthesizer(script=fake.utterance())
    async with connected(synthesizer, PATH) as client:
        for number in range(2):
            client.send(speak("Hel"), speak("lo "), FLUSH)
            messages, audio = await client.until(type="SpeechMetadata")
            assert sorted(message["type"] for message in messages) == ["Flushed", "SpeechMetadata", "SpeechStarted"]
            assert audio == fake.pcm_of(fake.utterance())
            [speech_id] = {message["speech_id"] for message in messages}
            counts = {"audio_duration_ms": 320, "input_character_count": 6, "billable_character_count": 6}
            spoke = {"seed": synthesizer.requests[number].seed, "model": fake.CUSTOM_VOICE.name, "voice": "ryan"}
            end = {"type": "SpeechMetadata", "speech_id": speech_id, "finish_reason": "stop"}
            assert messages[-1] == {**end, **counts, **spoke, "controls_applied": NO_CONTROLS}
        client.send(CLOSE)
        messages, _ = await client.until(closed=1000)
        assert messages[0] == {
            "type": "SessionMetadata",
            "total_audio_duration_ms": 640,
            "total_input_character_count": 12,
            "total_billable_character_count": 12,
        }
    assert (synthesizer.texts, synthesizer.requests[0].voice) == (["Hello"] * 2, "ryan")


async def test_a_lone_flush_is_answered_for_who_waits_for_an_end() -> None:
    (_, warning, end), audio = await heard(fake.FakeSynthesizer(), PATH, FLUSH, until={"type": "SpeechMetadata"})
    assert (warning["code"], end["audio_duration_ms"], audio) == ("NO_ACTIVE_SPEECH", 0, b"")


async def test_text_that_yields_no_speech() -> None:
    said = (speak("... "), FLUSH)
    messages, audio = await heard(fake.FakeSynthesizer(), PATH, *said, until={"type": "SpeechMetadata"})
    assert {"NO_SYNTHESIZABLE_TEXT"} == {message["code"] for message in messages if message["type"] == "Warning"}
    assert (audio, messages[-1]["audio_duration_ms"]) == (bytes(4800), 100)


async def test_an_interrupt_without_an_offset_counts_what_was_sent() -> None:
    synthesizer = fake.FakeSynthesizer(script=[fake.chunk(FRAME), asyncio.Event()])
    async with connected(synthesizer, PATH) as client:
        client.send(speak("A long story. "), speak("It goes on."), FLUSH)
        await synthesizer.waiting.wait()
        while not isinstance(await client.next(), bytes):
            pass
        client.send(INTERRUPT)
        (*_, told), _ = await client.until(type="SpeechInterrupted")
        assert told["audio_played_ms"] == told["metadata"]["audio_duration_ms"] == 80
        assert "text_spoken" not in told
        assert synthesizer.closed.is_set()
        client.send(INTERRUPT)
        await client.until(type="Warning", code="NO_ACTIVE_SPEECH")


async def test_offsets_are_of_the_session_and_must_advance() -> None:
    synthesizer = fake.FakeSynthesizer(script=[*fake.utterance(3)[:3], asyncio.Event()])
    async with connected(synthesizer, PATH) as client:
        for offset_ms in (50, 90):
            client.send(speak("A story"), FLUSH)
            await synthesizer.waiting.wait()
            synthesizer.waiting.clear()
            client.send(at(offset_ms))
            (*_, told), _ = await client.until(type="SpeechInterrupted")
            assert told["audio_played_ms"] == offset_ms
        client.send(speak("A story"), FLUSH)
        await synthesizer.waiting.wait()
        client.send(at(90))
        await client.until(type="Warning", code="INVALID_INTERRUPT_OFFSET")
        assert not synthesizer.closed.is_set()


async def test_a_turn_that_is_still_heard_can_be_interrupted_though_all_of_it_was_sent() -> None:
    async with connected(fake.FakeSynthesizer(fake.FOLLOWED, fake.followed()), PATH) as client:
        client.send(speak(fake.FOLLOWED_TEXT), FLUSH)
        (*_, end), _ = await client.until(type="SpeechMetadata")
        client.send(at(600))
        (*_, told), _ = await client.until(type="SpeechInterrupted")
        assert (told["text_spoken"], told["text_remaining"]) == ("Hello there", " all of you")
        assert told["metadata"]["speech_id"] == end["speech_id"]
        client.send(at(700), CLOSE)
        messages, _ = await client.until(type="SessionMetadata")
        assert messages[0]["code"] == "NO_ACTIVE_SPEECH"
        assert messages[-1]["total_audio_duration_ms"] == 600
        assert messages[-1]["total_input_character_count"] == len(fake.FOLLOWED_TEXT)


async def test_audio_counts_once_however_its_turn_ended() -> None:
    """Also where a turn is interrupted before any of it has sounded."""
    synthesizer = fake.FakeSynthesizer(script=fake.utterance())
    async with connected(synthesizer, PATH) as client:
        client.send(speak("Hello"), FLUSH)
        await client.until(type="SpeechMetadata")
        for script, of_turn_ms, played_ms in (([], 0, 320), ([fake.chunk(FRAME)], 80, 400), ([], 0, 400)):
            synthesizer.script = [*script, asyncio.Event()]
            synthesizer.waiting.clear()
            client.send(speak("A story"), FLUSH)
            await synthesizer.waiting.wait()
            client.send(INTERRUPT)
            (*_, told), _ = await client.until(type="SpeechInterrupted")
            assert (told["audio_played_ms"], told["metadata"]["audio_duration_ms"]) == (played_ms, of_turn_ms)
        client.send(CLOSE)
        (*_, end), _ = await client.until(type="SessionMetadata")
        assert end["total_audio_duration_ms"] == 400


async def test_a_speed_holds_for_the_turns_that_follow() -> None:
    async with connected(fake.FakeSynthesizer(script=fake.utterance(25)), PATH) as client:
        for speed, code in ((2, "SPEED_OUT_OF_RANGE"), (1.03, "SPEED_INCREMENT_INVALID"), ("x", "SPEED_OUT_OF_RANGE")):
            client.send({"type": "Configure", "speed": speed})
            await client.until(type="ConfigureFailure", code=code, field="speed")
        client.send({"type": "Configure", "speed": 1.25})
        await client.until(type="ConfigureSuccess", applied={"speed": 1.25})
        client.send(speak("Hello"), FLUSH)
        (*_, end), audio = await client.until(type="SpeechMetadata")
    assert len(audio) == pytest.approx(len(fake.pcm_of(fake.utterance(25))) / 1.25, rel=0.03)
    assert end["audio_duration_ms"] == pytest.approx(2000 / 1.25, rel=0.03)
