"""Tasks, as dashscope 2.0.2 sends them and reads their answers."""

import asyncio
import base64
import json

import httpx
import pytest

from tests.serve_app.audio.test_formats import decode
from tests.serve_app.extensions.client import Json, heard, talking
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, chunk, pcm_of, tone, utterance

pytestmark = pytest.mark.anyio

PATH = "/api-ws/v1/inference"
REST = "/api/v1/services/audio/tts/SpeechSynthesizer"
FRAME = tone(CUSTOM_VOICE.frame_samples)
# Of `AudioFormat.DEFAULT` and a `Request`.
DEFAULTS = {"format": "Default", "sample_rate": 0, "volume": 50, "rate": 1.0, "pitch": 1.0, "seed": 0, "type": 0}
FINISHED = {"type": "task-finished"}


def message(action: str, task: str, /, **payload: object) -> Json:
    return {"header": {"action": action, "task_id": task, "streaming": "duplex"}, "payload": payload}


def run(task: str, **parameters: object) -> Json:
    named = {"model": "cosyvoice-v3-flash", "task_group": "audio", "task": "tts", "function": "SpeechSynthesizer"}
    usual = {"voice": "longxiaochun", "text_type": "PlainText", **DEFAULTS}
    return message("run-task", task, **named, input={}, parameters={**usual, **parameters})


def say(task: str, **sent: object) -> Json:
    return message("continue-task", task, input=sent)


def finish(task: str, **sent: object) -> Json:
    return message("finish-task", task, input=sent)


def events(messages: list[Json]) -> list[tuple[str, str]]:
    return [(each["header"]["event"], each["header"]["task_id"]) for each in messages]


async def test_the_texts_of_a_task_are_spoken_and_the_socket_takes_the_next_task(synthesizer: FakeSynthesizer) -> None:
    async with talking(synthesizer, PATH) as client:
        for task in ("one", "two"):
            client.send(run(task, format="pcm", sample_rate=24000), say(task, text="Hello "), say(task, text="there."))
            client.send(finish(task))
            messages, audio = await client.until(**FINISHED)
            assert events(messages) == [(kind, task) for kind in ("task-started", "result-generated", "task-finished")]
            assert audio == pcm_of(utterance())
            sentence = messages[1]["payload"]["output"]["sentence"]
            assert (sentence["index"], sentence["begin_time"]) == (0, 0)
            assert sentence["end_time"] == pytest.approx(1000 * len(audio) / 2 / 24000, abs=1)
            assert messages[-1]["payload"] == {"output": None, "usage": {"characters": len("Hello there.")}}
            assert {entry["field"] for entry in messages[0]["ignored"]} == {"parameters.voice", "model"}
    assert synthesizer.texts == ["Hello there."] * 2


async def test_a_flush_ends_a_sentence_of_the_same_stream(synthesizer: FakeSynthesizer) -> None:
    sent = (run("a"), say("a", text="One. "), say("a", flush=True), say("a", flush=True), say("a", text="Two."))
    messages, audio = await heard(synthesizer, PATH, *sent, finish("a"), until=FINISHED)
    assert [text.strip() for text in synthesizer.texts] == ["One.", "Two."]
    assert [each["payload"]["output"]["sentence"]["index"] for each in messages[1:-1]] == [0, 1]
    samples, rate = decode(audio)  # MP3, the default
    assert samples.size / rate == pytest.approx(2 * len(pcm_of(utterance())) / 2 / 24000, abs=0.2)


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_cancelled_task_ends_without_the_rest(has_begun: bool) -> None:
    synthesizer = FakeSynthesizer(script=[chunk(FRAME), asyncio.Event()])
    async with talking(synthesizer, PATH) as client:
        client.send(run("a", format="pcm", sample_rate=24000))
        if has_begun:
            client.send(say("a", text="A long story."))
            await synthesizer.waiting.wait()
        client.send(finish("a", directive="cancel"))
        messages, _ = await client.until(**FINISHED)
        assert messages[-1]["finish_reason"] == "cancelled"
        client.send(say("a", text="More."))
        (refused,), audio = await client.until(type="task-failed")
        message = "task_id: this task is not running. Send run-task first."
        assert (refused["header"]["error_message"], audio) == (message, b"")
    assert synthesizer.closed.is_set() is has_begun


async def test_an_error_ends_its_task_but_not_another(synthesizer: FakeSynthesizer) -> None:
    async with talking(synthesizer, PATH) as client:
        client.send(run("a", format="pcm", sample_rate=24000), say("a", text="Hello"), run("b"))
        messages, _ = await client.until(type="task-failed")
        assert messages[-1]["header"]["task_id"] == "b"
        client.send(say("a", text=5))
        (*_, failed), _ = await client.until(type="task-failed")
        assert (failed["header"]["task_id"], failed["error"]["param"]) == ("a", "text")
        client.send(run("b", format="pcm", sample_rate=24000), say("b", text="Bye."), finish("b"))
        _, audio = await client.until(**FINISHED)
    assert audio == pcm_of(utterance())


async def test_a_task_without_text_ends(synthesizer: FakeSynthesizer) -> None:
    messages, audio = await heard(synthesizer, PATH, run("a"), finish("a"), until=FINISHED)
    assert (events(messages), audio) == ([("task-started", "a"), ("task-finished", "a")], b"")
    assert synthesizer.requests == []


async def test_a_whole_text_comes_with_its_task(synthesizer: FakeSynthesizer) -> None:
    """So `dashscope.audio.tts` sends it."""
    whole = run("a", format="pcm", sample_rate=24000)
    whole["header"]["streaming"], whole["payload"]["input"] = "out", {"text": "Hello."}
    _, audio = await heard(synthesizer, PATH, whole, until=FINISHED)
    assert (audio, synthesizer.texts) == (pcm_of(utterance()), ["Hello."])


@pytest.mark.parametrize(
    ("text", "spoken"), [("<speak>A &lt; <b>b</b></speak>", "A < b."), ("R&D **is** fun", "R&D is fun")]
)
async def test_enable_ssml_counts_for_ssml_only(synthesizer: FakeSynthesizer, text: str, spoken: str) -> None:
    sent = (run("a", enable_ssml=True), say("a", text=text), finish("a"))
    await heard(synthesizer, PATH, *sent, until=FINISHED)
    assert synthesizer.texts == [spoken]


async def test_one_text_over_http(client: httpx.AsyncClient, synthesizer: FakeSynthesizer) -> None:
    sent = {"text": "Hello.", "voice": "ryan", "format": "wav", "sample_rate": 24000, "rate": 1.0}
    whole = (await client.post(REST, json={"model": "cosyvoice-v3-flash", "input": sent})).json()["output"]["audio"]
    assert base64.b64decode(whole["data"])[44:] == pcm_of(utterance())
    body = {"model": "cosyvoice-v3-flash", "input": {**sent, "format": "pcm", "volume": 80}}
    answer = await client.post(REST, json=body, headers={"X-DashScope-SSE": "enable"})
    *parts, last = [json.loads(line[5:])["output"] for line in answer.text.splitlines() if line.startswith("data:")]
    assert {part["type"] for part in parts} == {"sentence-synthesis"}  # without it the SDK leaves out their audio
    assert b"".join(base64.b64decode(part["audio"]["data"]) for part in parts) == pcm_of(utterance())
    assert ("type" in last, last["finish_reason"]) == (False, "stop")
    assert "input.volume (it has no effect here)" in answer.headers["x-ignored"]
    assert {request.voice for request in synthesizer.requests} == {"ryan"}
