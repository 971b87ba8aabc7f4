"""Planted endings, over all sockets: what was not sent yet is made again, else the last message says how it ended."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest

from deployments.protocol import FinishReason, PcmChunk, SynthesisRequest
from tests.serve_app.extensions.client import Client, Json, talking
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, chunk
from tests.serve_app.one_model import posted
from tools.suites.rows import REST, SOCKETS, VOICE, SocketRow, is_here

pytestmark = pytest.mark.anyio

TEXT = "Hello there.\n\nThis is the second part of it.\n\nThis is the third one."
SECONDS = bytes([1, 0]) * 2 * CUSTOM_VOICE.sample_rate  # two

socket_rows = pytest.mark.parametrize("row", SOCKETS.values(), ids=SOCKETS)


class Ending(FakeSynthesizer):
    """Two seconds for each request, whose ends have these reasons; STOP where there is none left."""

    def __init__(self, *reasons: FinishReason) -> None:
        super().__init__()
        self.reasons = list(reasons)

    async def synthesize(self, request: SynthesisRequest, info: object = None) -> AsyncGenerator[PcmChunk, None]:
        reason = self.reasons.pop(0) if self.reasons else FinishReason.STOP
        self.script = [chunk(SECONDS), chunk(b"", frames=0, finish_reason=reason)]
        async for item in super().synthesize(request):
            yield item


@asynccontextmanager
async def speaking(row: SocketRow, synthesizer: FakeSynthesizer) -> AsyncIterator[Client]:
    async with talking(synthesizer, row.path, subprotocols=row.sample.protocols) as client:
        client.send(*row.speak(TEXT))
        yield client


async def last_message(client: Client, row: SocketRow) -> Json:
    kind, value = next(iter(row.over.items()))
    (*_, last), _ = await client.until(**{kind: value})
    inner: Json = last.get("response", last)
    return inner


def reason_in(last: Json) -> object:
    return last["finish_reason"] if "finish_reason" in last else last["stop_reason"]


@socket_rows
async def test_the_last_message_says_how_speech_that_was_sent_ended(row: SocketRow) -> None:
    async with speaking(row, Ending(FinishReason.RUNAWAY)) as client:
        assert reason_in(await last_message(client, row)) == FinishReason.RUNAWAY


@socket_rows
async def test_a_later_segment_that_ends_badly_is_made_again(row: SocketRow) -> None:
    synthesizer = Ending(FinishReason.STOP, FinishReason.LOOP)
    async with speaking(row, synthesizer) as client:
        assert reason_in(await last_message(client, row)) == FinishReason.STOP
    numbers = [request.request_id.rpartition(".")[2] for request in synthesizer.requests]
    assert numbers[1:] == ["2", "2", "3"]
    _, bad, again, _ = synthesizer.requests
    assert bad.seed != again.seed


async def test_it_is_made_again_once() -> None:
    row = SOCKETS["cartesia"]
    synthesizer = Ending(FinishReason.STOP, FinishReason.LOOP, FinishReason.EARLY)
    async with speaking(row, synthesizer) as client:
        assert reason_in(await last_message(client, row)) == FinishReason.EARLY
    assert len(synthesizer.requests) == 4


STREAMS: dict[str, tuple[str, Json, dict[str, str]]] = {
    "ours": ("/v1/audio/speech", {"input": TEXT, "voice": VOICE, "stream_format": "sse"}, {}),
    "cartesia": ("/tts/sse", {"transcript": TEXT, "voice": VOICE}, {}),
    "mistral": ("/v1/audio/speech", {"input": TEXT, "voice_id": VOICE, "stream": True}, {}),
    "dashscope": (REST, {"model": "q", "input": {"text": TEXT, "voice": VOICE}}, {"x-dashscope-sse": "enable"}),
}
INPUTS = [{"text": TEXT, "voice_id": VOICE}]
LINES: dict[str, tuple[str, Json]] = {
    "elevenlabs": (f"/v1/text-to-speech/{VOICE}/stream/with-timestamps", {"text": TEXT}),
    "elevenlabs-dialogue": (
        "/v1/text-to-dialogue/stream/with-timestamps",
        {"inputs": [{"text": TEXT, "voice_id": VOICE}]},
    ),
    "kokoro": ("/dev/captioned_speech", {"input": TEXT, "voice": VOICE}),
}


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.RUNAWAY])
@pytest.mark.parametrize("name", [name for name, (path, _) in LINES.items() if is_here(path)])
async def test_the_last_line_of_json_says_it_too(name: str, reason: FinishReason) -> None:
    path, body = LINES[name]
    answer = await posted(Ending(reason), path, json=body)
    *lines, last = map(json.loads, answer.text.splitlines())
    assert lines
    assert not any("finish_reason" in line for line in lines)
    assert last["finish_reason"] == reason
    assert {*last} == {*lines[0], "finish_reason"}  # its audio is empty


@pytest.mark.parametrize("name", [name for name, (path, *_) in STREAMS.items() if is_here(path)])
async def test_the_last_event_of_a_stream_says_it_too(name: str) -> None:
    path, body, headers = STREAMS[name]
    answer = await posted(Ending(FinishReason.RUNAWAY), path, json=body, headers=headers)
    *_, data = [line.removeprefix("data:") for line in answer.text.splitlines() if line.startswith("data:")]
    last = json.loads(data)
    assert last.get("output", last)["finish_reason"] == FinishReason.RUNAWAY
