import asyncio
import io

import av
import httpx
import pytest

from tests.serve_app.extensions.client import connect, heard, talking
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, chunk, pcm_of, tone, utterance

pytestmark = pytest.mark.anyio

# As LiveKit's plugin asks.
PATH = "/v1/speak?encoding=linear16&model=aura-2-andromeda-en&sample_rate=24000&mip_opt_out=false"
FLUSH, CLEAR, CLOSE = {"type": "Flush"}, {"type": "Clear"}, {"type": "Close"}
FRAME = tone(CUSTOM_VOICE.frame_samples)


def speak(text: str) -> dict[str, str]:
    return {"type": "Speak", "text": text}


async def test_words_become_one_turn_with_one_flushed() -> None:
    synthesizer = FakeSynthesizer(script=utterance())
    async with talking(synthesizer, PATH) as client:
        assert (await client.until(type="Metadata"))[0][0]["request_id"] == "conn"
        for number in (0, 1):
            client.send(*(speak(f"{word} ") for word in ("Hello", "there.", "Bye")), FLUSH)
            messages, audio = await client.until(type="Flushed")
            spoke = {"seed": synthesizer.requests[number].seed, "model": CUSTOM_VOICE.name, "voice": "serena"}
            assert messages == [{"type": "Flushed", "sequence_id": number, "finish_reason": "stop", **spoke}]
            assert audio == pcm_of(utterance())
    assert synthesizer.texts == ["Hello there. Bye"] * 2


async def test_an_unknown_voice_is_the_default_one_and_the_handshake_says_so(synthesizer: FakeSynthesizer) -> None:
    async with talking(synthesizer, PATH) as client:
        client.send(speak("Hi."), FLUSH)
        await client.until(type="Flushed")
    assert synthesizer.requests[0].voice == "serena"
    assert "model (unknown voice, used serena)" in client.headers["x-ignored"]
    assert "mip_opt_out" in client.headers["x-ignored"]


async def test_an_empty_flush_has_its_flushed(synthesizer: FakeSynthesizer) -> None:
    messages, audio = await heard(synthesizer, PATH, FLUSH, until={"type": "Flushed"})
    assert ([message["type"] for message in messages], audio) == (["Metadata", "Flushed"], b"")


async def test_a_turn_that_is_cleared_leaves_its_number_to_the_next_one() -> None:
    synthesizer = FakeSynthesizer(script=[chunk(FRAME), asyncio.Event()])
    async with talking(synthesizer, PATH) as client:
        client.send(speak("A long story. "), FLUSH)
        await synthesizer.waiting.wait()
        client.send(CLEAR)
        await client.until(type="Cleared", sequence_id=0)
        synthesizer.script = utterance(1)
        client.send(speak("New"), FLUSH)
        await client.until(type="Flushed", sequence_id=0)


async def test_close_drains_and_ends() -> None:
    async with talking(FakeSynthesizer(script=utterance()), PATH) as client:
        client.send(speak("Good bye"), CLOSE)
        messages, audio = await client.until(closed=1000)
        assert [message.get("type") for message in messages] == ["Metadata", "Flushed", None]
        assert audio == pcm_of(utterance())
        await client.connection.task


async def test_a_warning_has_its_words_under_two_names(synthesizer: FakeSynthesizer) -> None:
    for bad in ({"type": "Sing"}, {"type": "Speak"}):
        (*_, warning), _ = await heard(synthesizer, PATH, bad, until={"type": "Warning"})
        assert warning["warn_msg"] == warning["description"]


@pytest.mark.parametrize(
    ("query", "synthesizer", "status", "why"),
    [
        ("encoding=mp3", FakeSynthesizer(), 400, "encoding"),
        ("sample_rate=12345", FakeSynthesizer(), 400, "sample_rate"),
        ("speed=fast", FakeSynthesizer(), 400, "speed"),
        ("model=x", FakeSynthesizer(info=None), 503, "loading"),
    ],
)
async def test_refused_handshakes_say_why(query: str, synthesizer: FakeSynthesizer, status: int, why: str) -> None:
    async with connect(synthesizer, f"/v1/speak?{query}") as connection:
        start = await connection.next()
        assert (start["type"], start["status"]) == ("websocket.http.response.start", status)
        assert why in dict(start["headers"])[b"dg-error"].decode()


@pytest.mark.parametrize("more", ["sample_rate=8000", "container=wav"])
async def test_telephones_have_their_rate_also_by_default(more: str) -> None:
    path, synthesizer = f"/v1/speak?encoding=mulaw&{more}", FakeSynthesizer(script=utterance(25))
    messages, audio = await heard(synthesizer, path, speak("Hi"), FLUSH, until={"type": "Flushed"})
    assert len(audio) == pytest.approx(8000 * 2, abs=20)
    ignored = [{"field": "container", "reason": "WebSockets have none"}] if "container" in more else None
    assert messages[0].get("ignored") == ignored


async def test_inline_pronunciations_become_their_word(client: httpx.AsyncClient, synthesizer: FakeSynthesizer) -> None:
    text = 'Take \\{"word": "dupilumab", "pronounce": "duːˈpɪljuːmæb"\\} daily'
    response = await client.post("/v1/speak?model=ryan&container=none&encoding=linear16", json={"text": text})
    assert (response.status_code, response.content) == (200, pcm_of(utterance()))
    assert response.headers["content-type"].startswith("audio/pcm;rate=24000")
    assert synthesizer.texts == ["Take dupilumab daily"]


@pytest.mark.parametrize("path", ["/v1/speak", "/v2/speak"])
@pytest.mark.parametrize(
    ("encoding", "codec"), [("mulaw", "pcm_mulaw"), ("alaw", "pcm_alaw"), ("linear16", "pcm_s16le")]
)
async def test_raw_formats_are_wav_by_default(client: httpx.AsyncClient, path: str, encoding: str, codec: str) -> None:
    rate = 24000 if encoding == "linear16" else 8000
    answer = await client.post(f"{path}?encoding={encoding}", json={"text": "Hello"})
    assert answer.headers["content-type"] == "audio/wav"
    with av.open(io.BytesIO(answer.content)) as container:
        [stream] = container.streams.audio
        assert (container.format.name, stream.codec_context.name, stream.rate) == ("wav", codec, rate)
        num_samples = sum(frame.samples for frame in container.decode(stream))
    assert num_samples == pytest.approx(4 * 0.08 * rate, abs=40)
    bare = await client.post(f"{path}?encoding={encoding}&container=none", json={"text": "Hello"})
    assert f"rate={rate}" in bare.headers["content-type"]
    assert bare.content == answer.content[44:]
    asked = await client.post(f"{path}?encoding={encoding}&sample_rate=16000", json={"text": "Hello"})
    assert int.from_bytes(asked.content[24:28], "little") == 16000
    assert "x-ignored" not in answer.headers


@pytest.mark.parametrize(
    ("query", "kind", "reason"),
    [
        ("", "mpeg", None), ("encoding=mp3&container=none", "mpeg", None), ("encoding=opus", "ogg", None),
        ("encoding=mp3&container=wav", "mpeg", "mp3 uses none"), ("encoding=opus&container=ogg", "ogg", None),
        ("encoding=opus&container=none", "ogg", "opus uses ogg"), ("encoding=linear16&container=wav", "wav", None),
        ("encoding=mulaw&container=ogg", "wav", "mulaw uses wav"),
        ("encoding=alaw&sample_rate=8000&container=none", "x-alaw-basic;rate=8000;channels=1", None),
    ],
)  # fmt: skip
async def test_formats_and_containers(client: httpx.AsyncClient, query: str, kind: str, reason: str | None) -> None:
    answer = await client.post(f"/v1/speak?{query}", json={"text": "Hello"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, f"audio/{kind}")
    assert answer.content
    assert answer.headers.get("x-ignored") == (None if reason is None else f"container ({reason})")
