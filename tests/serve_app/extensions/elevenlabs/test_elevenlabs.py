import asyncio
import base64
import json
from typing import Any

import httpx
import pytest

from deployments.errors import Overloaded
from tests.serve_app import fake
from tests.serve_app.extensions.client import Json, connect, heard, talking
from tests.serve_app.one_model import posted

pytestmark = pytest.mark.anyio

# As LiveKit's plugin asks, but for the format.
CONTEXTS = (
    "/v1/text-to-speech/ryan/multi-stream-input?model_id=eleven_turbo_v2_5&output_format=pcm_24000"
    "&enable_ssml_parsing=false&inactivity_timeout=180&sync_alignment=true&auto_mode=true"
)
DIALOGUES = "/v1/text-to-dialogue/multi-stream-input?model_id=eleven_v4&output_format=pcm_24000&sync_alignment=true"
FRAME = fake.tone(fake.CUSTOM_VOICE.frame_samples)


def begin(context: str = "one") -> Json:
    return {"text": " ", "voice_settings": {}, "context_id": context}


def sentence(text: str, context: str = "one") -> Json:
    return {"text": text, "context_id": context, "flush": True}


def end(context: str = "one") -> list[Json]:
    return [{"text": "", "context_id": context, "flush": True}, {"context_id": context, "close_context": True}]


def audio_of(messages: list[Json]) -> bytes:
    return b"".join(base64.b64decode(message["audio"]) for message in messages if message.get("audio"))


async def test_a_context_drains_when_it_ends() -> None:
    synthesizer = fake.FakeSynthesizer(script=fake.utterance())
    async with talking(synthesizer, CONTEXTS) as client:
        for context in ("one", "two"):
            client.send(begin(context), sentence("Hello there. ", context), sentence("Bye. ", context), *end(context))
            messages, _ = await client.until(isFinal=True)
            assert audio_of(messages) == 2 * fake.pcm_of(fake.utterance())
            assert {message["contextId"] for message in messages} == {context}
            assert [message.get("isFinal") for message in messages].count(True) == 1
            last = synthesizer.requests[-1]
            spoke = {"seed": last.seed, "model": fake.CUSTOM_VOICE.name, "voice": last.voice}
            assert messages[-1] == {"contextId": context, "isFinal": True, "finish_reason": "stop", **spoke}
    assert synthesizer.texts == ["Hello there.", "Bye."] * 2
    assert "model_id (the loaded model is" in client.headers["x-ignored"]
    assert "sync_alignment" not in client.headers["x-ignored"]


def words_ms(chars: list[str], starts_ms: list[int]) -> list[tuple[str, int]]:
    """Words, which end at a space, and when each begins."""
    begins = [place for place in range(len(chars)) if place == 0 or chars[place - 1] == " "]
    words = "".join(chars).split(" ")
    assert words.pop() == "", "a space follows the last word"
    return [(word, starts_ms[begin]) for word, begin in zip(words, begins, strict=True)]


TOLD = list(zip(fake.FOLLOWED_TEXT.split(), fake.FOLLOWED_MS, strict=True))
TWICE = [*TOLD, *((word, 880 + begin) for word, begin in TOLD)]


TWO_SENTENCES = [begin(), *2 * [sentence(f"{fake.FOLLOWED_TEXT} ")], *end()]


async def timed(path: str, messages: list[Json], last: Json) -> list[Json]:
    return (await heard(fake.FakeSynthesizer(fake.FOLLOWED, fake.followed()), path, *messages, until=last))[0]


def all_of(alignments: list[Json], name: str) -> list[Any]:
    return [each for alignment in alignments for each in alignment[name]]


async def test_alignments_count_from_the_beginning_of_the_context() -> None:
    """As LiveKit's plugin, which asks for `sync_alignment`, takes them."""
    got = await timed(CONTEXTS, TWO_SENTENCES, {"isFinal": True})
    told = [message for message in got if message.get("alignment")]
    assert all(message["normalizedAlignment"] == message["alignment"] for message in told)
    alignments = [message["alignment"] for message in told]
    for alignment in alignments:
        assert len({len(values) for values in alignment.values()}) == 1
        assert all(len(char) == 1 for char in alignment["chars"])
        assert all(duration_ms >= 0 for duration_ms in alignment["charDurationsMs"])
    assert words_ms(all_of(alignments, "chars"), all_of(alignments, "charStartTimesMs")) == TWICE
    assert audio_of(got) == 2 * fake.pcm_of(fake.utterance(11))


@pytest.mark.parametrize("asked", ["", "&sync_alignment=false"])
async def test_alignments_restart_with_every_message_where_nobody_asks_for_one_clock(asked: str) -> None:
    """As Pipecat's service, which does not, adds them up."""
    got = await timed(CONTEXTS.replace("&sync_alignment=true", asked), TWO_SENTENCES, {"isFinal": True})
    chars: list[str] = []
    starts_ms: list[int] = []
    clock_ms = 0
    for message in got:
        if alignment := message.get("alignment"):
            chars += alignment["chars"]
            starts_ms += [clock_ms + start_ms for start_ms in alignment["charStartTimesMs"]]
            clock_ms += alignment["charStartTimesMs"][-1] + alignment["charDurationsMs"][-1]
    assert words_ms(chars, starts_ms) == TWICE


async def test_a_context_that_is_closed_while_it_drains_is_silent_at_once() -> None:
    synthesizer = fake.FakeSynthesizer(script=[fake.chunk(FRAME), asyncio.Event()])
    async with talking(synthesizer, CONTEXTS) as client:
        client.send(begin(), sentence("A long story. "))
        await synthesizer.waiting.wait()
        client.send(*end(), {"context_id": "one", "close_context": True})
        await client.until(isFinal=True, contextId="one")
        assert synthesizer.closed.is_set()
        synthesizer.script = fake.utterance(1)
        client.send(begin("two"), sentence("New. ", "two"), *end("two"))
        messages, _ = await client.until(isFinal=True)
        assert {message["contextId"] for message in messages} == {"two"}


async def test_keepalives_and_unknown_contexts_say_nothing() -> None:
    async with talking(fake.FakeSynthesizer(script=fake.utterance(1)), CONTEXTS) as client:
        early = {"text": "", "context_id": "one", "new": 1}
        client.send({"text": ""}, early, {"context_id": "gone", "close_context": True})
        for is_first in (True, False):  # the first context reports the unknown field of the early message
            client.send(begin(), *end())
            [final], _ = await client.until(isFinal=True)
            assert final.items() >= {"contextId": "one", "isFinal": True, "finish_reason": "stop"}.items()
            assert [each["field"] for each in final.get("ignored", ())] == ["new"] * is_first
        client.send({"close_socket": True})
        await client.until(closed=1000)
        await client.connection.task


async def said(synthesizer: fake.FakeSynthesizer, *messages: Json, path: str = CONTEXTS) -> list[Json]:
    """All messages about one context after these were sent."""
    return (await heard(synthesizer, path, *messages, *end(), until={"isFinal": True}))[0]


async def test_a_context_has_one_encoder() -> None:
    path, synthesizer = CONTEXTS.replace("pcm_24000", "opus_48000_32"), fake.FakeSynthesizer(script=fake.utterance(12))
    audio = audio_of(await said(synthesizer, begin(), sentence("Hello. "), sentence("Bye. "), path=path))
    assert (len(synthesizer.requests), audio.count(b"OpusHead")) == (2, 1)


async def test_a_failure_is_told_and_ends_its_context() -> None:
    synthesizer = fake.FakeSynthesizer(script=[Overloaded("full", 2.0)])
    told, *_ = await said(synthesizer, begin(), sentence("Hello. "))
    assert (told["code"], told["contextId"]) == ("rate_limit_exceeded", "one")


async def test_a_format_that_is_none_refuses_the_handshake(synthesizer: fake.FakeSynthesizer) -> None:
    for name in ("mp4_1_2", "mp3", "pcm_x"):
        async with connect(synthesizer, CONTEXTS.replace("pcm_24000", name)) as refused:
            assert (await refused.next())["status"] == 400


async def test_one_text_is_streamed_in_and_the_server_closes(synthesizer: fake.FakeSynthesizer) -> None:
    async with talking(synthesizer, "/v1/text-to-speech/ryan/stream-input?output_format=pcm_24000") as client:
        client.send({"text": " ", "try_trigger_generation": True, "voice_settings": None})
        client.send({"text": "Hello "}, {"text": "there. "}, {"text": ""})
        messages, _ = await client.until(closed=1000)
        assert audio_of(messages) == fake.pcm_of(fake.utterance())
        await client.connection.task
    assert synthesizer.texts == ["Hello there."]


async def test_dialogues(synthesizer: fake.FakeSynthesizer) -> None:
    messages: list[Json] = [
        {"voices": ["aiden"]},
        {"keep_alive": True},
        {"inputs": [{"text": "Hello. ", "voice_id": "aiden"}]},
        {"keep_alive": True},
        {"inputs": [{"text": "", "voice_id": "aiden"}], "flush": True},
        {"close_context": True},
    ]
    context = {"context_id": "one"}
    told = [{**context, **each} for each in messages]
    got, _ = await heard(synthesizer, DIALOGUES, *told, until={"is_final": True, **context})
    assert audio_of(got) == fake.pcm_of(fake.utterance())
    assert (synthesizer.texts, synthesizer.requests[0].voice) == (["Hello."], "aiden")


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/v1/text-to-speech/ryan", "audio/mpeg"),
        ("/v1/text-to-speech/ryan/stream?output_format=ulaw_8000", "audio/basic;rate=8000;channels=1"),
        ("/v1/text-to-speech/nobody?output_format=opus_48000_64", "audio/ogg"),
    ],
)
async def test_over_http(client: httpx.AsyncClient, path: str, content_type: str) -> None:
    body = {"text": "Hello", "model_id": "eleven_turbo_v2_5", "voice_settings": {"speed": 1.1, "stability": 0.5}}
    response = await client.post(path, json=body)
    assert (response.status_code, response.headers["content-type"]) == (200, content_type)
    assert response.content


async def test_timestamps_have_the_same_audio(client: httpx.AsyncClient) -> None:
    path = "/v1/text-to-speech/ryan{}/with-timestamps?output_format=pcm_24000"
    whole = (await client.post(path.format(""), json={"text": "Hello"})).json()
    lines = (await client.post(path.format("/stream"), json={"text": "Hello"})).text.splitlines()
    streamed = b"".join(base64.b64decode(json.loads(line)["audio_base64"]) for line in lines)
    assert base64.b64decode(whole["audio_base64"]) == streamed == fake.pcm_of(fake.utterance())
    assert all(line.isascii() and len(line) < 128 << 10 for line in lines)


async def test_a_dialogue_over_http(client: httpx.AsyncClient, synthesizer: fake.FakeSynthesizer) -> None:
    inputs = [{"text": "Hello.", "voice_id": "aiden"}, {"text": "Hi!", "voice_id": "ryan"}]
    response = await client.post("/v1/text-to-dialogue/stream?output_format=pcm_24000", json={"inputs": inputs})
    assert response.content == 2 * fake.pcm_of(fake.utterance())
    assert "x-ignored" not in response.headers
    first, second = synthesizer.requests
    assert (first.text, first.voice, first.continues) == ("Hello.", "aiden", False)
    assert (second.text, second.voice, second.continues) == ("Hi!", "ryan", True)
    assert second.request_id == f"{first.request_id}-2"
    assert first.seed != second.seed
    assert (await client.post("/v1/text-to-dialogue", json={"inputs": "x"})).status_code == 400


async def test_turns_of_a_dialogue(client: httpx.AsyncClient, synthesizer: fake.FakeSynthesizer) -> None:
    """Inputs in a row with one voice are one turn, a turn without words is none, an unknown voice is named; a seed
    repeats all of it.
    """
    turns = [("Hello.", "aiden"), ("Again.", "aiden"), ("...", "ryan"), ("Hi!", "nobody"), ("Bye.", "aiden")]
    body = {"inputs": [{"text": text, "voice_id": voice} for text, voice in turns], "seed": 5}
    response = await client.post("/v1/text-to-dialogue?output_format=pcm_24000", json=body)
    assert [each.text for each in synthesizer.requests] == ["Hello. Again.", "Hi!", "Bye."]
    assert "inputs.voice_id" in response.headers["x-ignored"]
    seeds = [each.seed for each in synthesizer.requests]
    synthesizer.requests.clear()
    await client.post("/v1/text-to-dialogue?output_format=pcm_24000", json=body)
    assert [each.seed for each in synthesizer.requests] == seeds
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("model", "read"), [("eleven_v3", ""), ("eleven_v4_turbo", ""), ("eleven_flash_v2_5", "[Old man] ")]
)
async def test_brackets_are_tags_of_the_models_that_have_them(model: str, read: str) -> None:
    synthesizer = fake.FakeSynthesizer(script=fake.utterance())
    text = "[Old man] Hello. [1] [sad] Bye."
    inputs = [{"text": text, "voice_id": "aiden"}, {"text": "[laughs] Hi.", "voice_id": "ryan"}]
    answer = await posted(synthesizer, "/v1/text-to-dialogue", json={"inputs": inputs, "model_id": model})
    path = f"/v1/text-to-speech/ryan/stream-input?model_id={model}&output_format=pcm_24000"
    await heard(synthesizer, path, {"text": text}, {"text": ""}, until={"isFinal": True})
    style = None if read else "Old man"
    spans = [(f"{read}Hello. [1]", style), ("Bye.", "sad")]
    parts = zip(synthesizer.texts, synthesizer.requests, strict=True)
    told = [(text.strip(), request.instructions) for text, request in parts]
    assert told == [*spans, ("Hi.", None), *spans]
    assert answer.headers["x-ignored"].endswith("inputs (not read aloud: direction in brackets 1)")


@pytest.mark.parametrize("stream", [False, True])
async def test_times_of_a_dialogue_count_from_its_beginning(stream: bool) -> None:
    path = f"/v1/text-to-dialogue{'/stream' if stream else ''}/with-timestamps?output_format=pcm_24000"
    inputs = [{"text": fake.FOLLOWED_TEXT, "voice_id": voice} for voice in ("aiden", "ryan")]
    answer = await posted(fake.FakeSynthesizer(fake.FOLLOWED, fake.followed()), path, json={"inputs": inputs})
    told = [alignment for line in answer.text.splitlines() if (alignment := json.loads(line)["alignment"])]
    starts_ms = [round(1000 * start_s) for start_s in all_of(told, "character_start_times_seconds")]
    length_ms = len(fake.pcm_of(fake.followed())) / 48
    words = words_ms(all_of(told, "characters"), starts_ms)
    first = words[: len(words) // 2]
    assert words == first + [(word, pytest.approx(start_ms + length_ms, abs=1)) for word, start_ms in first]


async def test_lists(client: httpx.AsyncClient) -> None:
    for version in ("v1", "v2"):
        first = (await client.get(f"/{version}/voices")).json()["voices"][0]
        assert (first["voice_id"], first["name"], first["category"]) == ("serena", "Serena", "premade")
    assert (await client.get("/v1/voices/ryan")).json()["name"] == "Ryan"
    assert (await client.get("/v1/models", headers={"xi-api-key": "k"})).json()[0]["can_do_text_to_speech"]
    assert (await client.get("/v1/models")).json()["object"] == "list"
    assert (await client.get("/v1/user")).json()["subscription"] == (await client.get("/v1/user/subscription")).json()


async def test_a_context_names_what_has_no_effect_once() -> None:
    settings = {"voice_settings": {"stability": 0.5, "speed": 9}, "pronunciation_dictionary_locators": []}
    async with talking(fake.FakeSynthesizer(script=fake.utterance()), CONTEXTS) as client:
        client.send({**begin(), **settings}, sentence("Hello there. "), *end())
        messages, _ = await client.until(isFinal=True)
    assert messages[0]["ignored"] == [
        {"field": "voice_settings.speed", "reason": "must be a number from 0.25 to 4"},
        {"field": "voice_settings.stability", "reason": "not supported"},
    ]
    assert all("ignored" not in message for message in messages[1:])
    assert "sync_alignment" not in client.headers["x-ignored"]
    assert "enable_ssml_parsing" not in client.headers["x-ignored"]


async def test_contexts_that_never_speak_keep_little(synthesizer: fake.FakeSynthesizer) -> None:
    never = ({"text": "", "context_id": f"never{number}", "what": 1} for number in range(40))
    messages = await said(synthesizer, *never, {**begin(), "voice_settings": {"style": 1}}, sentence("Hello. "))
    assert [entry["field"] for entry in messages[0]["ignored"]] == ["voice_settings.style"]


@pytest.mark.parametrize("last", [[], end()])
async def test_a_name_can_be_used_again_while_the_end_of_the_one_before_waits_to_be_sent(last: list[Json]) -> None:
    synthesizer = fake.FakeSynthesizer(
        script=[*fake.utterance(1)[:1], *([] if last else [Overloaded("full", 2.0)]), *fake.utterance(0)]
    )
    async with talking(synthesizer, CONTEXTS) as client:
        client.connection.stall()
        client.send(begin(), sentence("Hello. "), *last)
        await client.connection.sending.wait()
        for _ in range(50):  # all of the first is spoken, none of it is sent
            await asyncio.sleep(0)
        synthesizer.script = fake.utterance(2)
        client.send(begin(), sentence("Again. "), *end())
        for _ in range(50):
            await asyncio.sleep(0)
        client.connection.flow()
        first, _ = await client.until(isFinal=True)
        second, _ = await client.until(isFinal=True)
    assert (audio_of(first), audio_of(second)) == (fake.pcm_of(fake.utterance(1)), fake.pcm_of(fake.utterance(2)))


async def test_bad_ssml_in_a_conversation_is_an_error_and_adds_nothing(synthesizer: fake.FakeSynthesizer) -> None:
    path = "/v1/text-to-speech/ryan/multi-stream-input?enable_ssml_parsing=true&output_format=pcm_24000"
    bad = {"text": "One <b>two</i> ", "context_id": "a"}
    messages, _ = await heard(synthesizer, path, bad, until={"contextId": "a"})
    assert "text: invalid SSML" in messages[-1]["error"]
