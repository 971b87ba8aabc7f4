import asyncio
import base64
import json
import struct
from pathlib import Path

import httpx
import pytest

from deployments.errors import Overloaded
from serve_app.extensions.live.contexts import MAX_CONTEXTS, MAX_NAME_CHARS
from tests.serve_app import fake
from tests.serve_app.extensions.client import Json, heard, talking
from tests.serve_app.extensions.voices.speakers import Server, wav

pytestmark = pytest.mark.anyio

PATH = "/tts/websocket?cartesia_version=2025-04-16"
FRAME = fake.tone(fake.CUSTOM_VOICE.frame_samples)


def write(text: str, *, context: str = "one", more: bool = True, **fields: object) -> Json:
    """As LiveKit's plugin does."""
    output = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24000}
    asked = {"model_id": "sonic-3", "voice": {"mode": "id", "id": "ryan"}, "output_format": output, "language": "en"}
    return {**asked, "context_id": context, "transcript": text, "continue": more, "add_timestamps": True, **fields}


def audio_of(messages: list[Json], context: str = "one") -> bytes:
    chunks = [message for message in messages if message["type"] == "chunk" and message["context_id"] == context]
    return b"".join(base64.b64decode(message["data"]) for message in chunks)


async def test_a_context_is_written_in_pieces_and_done_once(synthesizer: fake.FakeSynthesizer) -> None:
    async with talking(synthesizer, PATH) as client:
        for context in ("one", "two"):
            client.send(*(write(text, context=context) for text in ("Hello there. ", "And ", "bye. ")))
            client.send(write(" ", context=context, more=False))
            messages, _ = await client.until(type="done", context_id=context)
            assert audio_of(messages, context) == fake.pcm_of(fake.utterance())
            assert {message["type"] for message in messages} == {"chunk", "done"}
            spoke = {"seed": synthesizer.requests[-1].seed, "model": fake.CUSTOM_VOICE.name, "voice": "ryan"}
            assert messages[-1].items() >= spoke.items()
            assert synthesizer.texts[-1] == "Hello there. And bye."
            assert {request.voice for request in synthesizer.requests} == {"ryan"}


def times_of(messages: list[Json]) -> Json:
    """All words, and the milliseconds at which they begin and end."""
    told = [message["word_timestamps"] for message in messages if message["type"] == "timestamps"]
    words = [word for each in told for word in each["words"]]
    return {"words": words, **{key: [round(1000 * s) for each in told for s in each[key]] for key in ("start", "end")}}


DONE = {"type": "done"}


async def test_timestamps_count_from_the_beginning_of_the_context() -> None:
    written = (write(fake.FOLLOWED_TEXT, flush=True), write(fake.FOLLOWED_TEXT, more=False))
    messages, _ = await heard(fake.FakeSynthesizer(fake.FOLLOWED, fake.followed()), PATH, *written, until=DONE)
    times = times_of(messages)
    assert times["words"] == 2 * fake.FOLLOWED_TEXT.split()
    assert times["start"] == [*fake.FOLLOWED_MS, *(880 + begin for begin in fake.FOLLOWED_MS)]
    assert {message["context_id"] for message in messages} == {"one"}
    assert all(message["done"] is (message["type"] == "done") for message in messages)
    assert audio_of(messages) == 2 * fake.pcm_of(fake.utterance(11))


async def test_timestamps_are_told_where_they_are_asked_for() -> None:
    synthesizer = fake.FakeSynthesizer(fake.FOLLOWED, fake.followed())
    asked = write(fake.FOLLOWED_TEXT, more=False, add_timestamps=False)
    messages, _ = await heard(synthesizer, PATH, asked, until=DONE)
    assert times_of(messages)["words"] == []
    assert not synthesizer.requests[0].word_times


async def test_nothing_to_say_is_done_without_audio() -> None:
    (done,), audio = await heard(fake.FakeSynthesizer(), PATH, write(" ", more=False), until=DONE)
    assert (done["type"], audio) == ("done", b"")


async def test_contexts_speak_beside_each_other() -> None:
    gate = asyncio.Event()
    synthesizer = fake.FakeSynthesizer(script=[fake.chunk(FRAME), gate])
    async with talking(synthesizer, PATH) as client:
        client.send(write("One", context="one", more=False), write("Two", context="two", more=False))
        while len(synthesizer.requests) < 2:
            await client.next()
        gate.set()
        for _ in range(2):
            await client.until(type="done")


async def test_a_flush_is_answered_behind_its_audio() -> None:
    async with talking(fake.FakeSynthesizer(script=fake.utterance(1)), PATH) as client:
        for message, end in (
            (write("Hello", flush=True), {"type": "flush_done", "flush_done": True}),
            (write("Bye", more=False), DONE),
        ):
            client.send(message)
            messages, _ = await client.until(**end)
            assert audio_of(messages) == FRAME


async def test_what_is_wrong_is_told_in_the_context() -> None:
    async with talking(fake.FakeSynthesizer(script=[Overloaded("full", 2.0)]), PATH) as client:
        client.send({"context_id": "one", "transcript": 5})
        client.send(write("Hi", output_format={"container": "raw", "encoding": "pcm_s24"}))
        client.send(write("Hi", more=False))
        for status in (400, 400, 429):
            (error,), _ = await client.until(type="error", context_id="one", done=True)
            assert error["status_code"] == status


async def test_the_name_of_a_context_is_short() -> None:
    async with talking(fake.FakeSynthesizer(script=fake.utterance()), PATH) as client:
        for name in ("x" * (MAX_NAME_CHARS + 1), 7):
            client.send(write("x", context=name))  # type: ignore[arg-type]
            (error,), _ = await client.until(type="error")
            assert (error["context_id"], error["status_code"]) == (None, 400)
        client.send(write("x", context="x" * MAX_NAME_CHARS, more=False))
        await client.until(type="done", context_id="x" * MAX_NAME_CHARS)


async def test_contexts_are_few() -> None:
    async with talking(fake.FakeSynthesizer(script=[asyncio.Event()]), PATH) as client:
        client.send(*(write("x", context=str(number)) for number in range(MAX_CONTEXTS + 1)))
        (error,), _ = await client.until(type="error")
        assert (error["context_id"], error["error_code"]) == (str(MAX_CONTEXTS), "too_many_contexts")


async def test_a_compressed_context_is_complete(client: httpx.AsyncClient, synthesizer: fake.FakeSynthesizer) -> None:
    """An encoder holds its last samples back until the end."""
    output = {"container": "mp3", "sample_rate": 24000, "bit_rate": 128000}
    whole = await client.post("/tts/bytes", json={**write("Hello."), "output_format": output})
    async with talking(synthesizer, PATH) as socket:
        socket.send(write("Hello.", more=False, output_format=output))
        messages, _ = await socket.until(type="done")
    assert audio_of(messages) == whole.content


async def test_events(client: httpx.AsyncClient) -> None:
    response = await client.post("/tts/sse", json=write("Hello"))
    assert response.headers["content-type"] == "text/event-stream"
    messages = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert audio_of(messages, messages[0]["context_id"]) == fake.pcm_of(fake.utterance())
    assert messages[-1]["type"] == "done"


async def test_voices_are_one_page_unless_a_part_is_asked_for(client: httpx.AsyncClient) -> None:
    page = (await client.get("/voices?limit=100")).json()
    assert (page["data"][0]["id"], page["has_more"]) == ("serena", False)
    assert (await client.get("/voices/Ryan")).json()["name"] == "Ryan"
    assert [(await client.get(f"/voices/{name}")).json()["is_owner"] for name in ("ryan", "alloy")] == [False] * 2
    assert (await client.get("/voices/nobody")).status_code == 400


@pytest.mark.parametrize(
    ("encoding", "tag", "size"), [("pcm_mulaw", 7, 1), ("pcm_alaw", 6, 1), ("pcm_f32le", 3, 4), ("pcm_s16le", 1, 2)]
)
async def test_a_wav_has_the_encoding_asked_for(client: httpx.AsyncClient, encoding: str, tag: int, size: int) -> None:
    output = {"container": "wav", "encoding": encoding, "sample_rate": 24000}
    wav = await client.post("/tts/bytes", json={"transcript": "Hello", "output_format": output})
    raw = await client.post("/tts/bytes", json={"transcript": "Hello", "output_format": {**output, "container": "raw"}})
    assert wav.headers["content-type"] == "audio/wav"
    assert struct.unpack_from("<HHIIHH", wav.content, 20) == (tag, 1, 24000, 24000 * size, size, 8 * size)
    assert len(wav.content) - 44 == 4 * 1920 * size
    assert wav.content[44:] == raw.content


async def test_the_first_reply_of_a_context_names_what_has_no_effect() -> None:
    async with talking(fake.FakeSynthesizer(script=fake.utterance()), PATH) as client:
        for context in ("one", "two"):
            client.send(write("Hello. ", context=context, generation_config={"volume": 2, "emotion": "sad"}))
            client.send(write("", context=context, more=False, generation_config={"volume": 2}))
            messages, _ = await client.until(type="done", context_id=context)
            fields = {entry["field"] for entry in messages[0]["ignored"]}
            assert fields == {"model_id", "generation_config.volume"}
            assert all("ignored" not in message for message in messages[1:])


async def test_a_voice_is_stored_spoken_with_and_deleted(tmp_path: Path) -> None:
    client = Server(tmp_path / "store").client()
    fields = {"name": "ada", "language": "en", "mode": "similarity"}
    told = await client.post("/voices/clone", data=fields, files={"clip": ("clip.wav", wav())})
    assert told.json()["is_owner"] is True
    assert "mode" in told.headers["x-ignored"]
    spoken = await client.post("/tts/bytes", json={"transcript": "Hi.", "voice": {"id": told.json()["id"]}})
    assert spoken.status_code == 200
    assert (await client.delete(f"/voices/{told.json()['id']}")).status_code == 204
