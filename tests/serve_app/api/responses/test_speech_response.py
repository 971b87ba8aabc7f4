"""The form of a response, and the header that says how the time to its first audio was spent."""

import anyio
import numpy as np
import pytest
from starlette.types import Message

from deployments.protocol import PcmChunk, SynthesisRequest, with_mark
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.request_record import start_marks
from serve_app.api.resolve.speech_request import negotiate
from serve_app.api.responses.speech_response import SpeechResponse, Usage, audio_body, server_timing
from serve_app.audio.formats import AudioFormat, AudioOptions, Rendering
from serve_app.speech.segments import Utterance
from tests.serve_app.fake import FakeSynthesizer

pytestmark = pytest.mark.anyio

CODES = np.zeros((1, 16), np.int16)


def content_type(accept: str, **fields: object) -> str:
    return negotiate(SpeechBody.model_validate({"input": "x", **fields}), accept).content_type(24000)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "audio/mpeg"), ("*/*", "audio/mpeg"), ("application/octet-stream", "audio/mpeg"),
        ("audio/L16", "audio/L16;rate=24000;channels=1"), ("audio/pcm;rate=24000", "audio/pcm;rate=24000;channels=1"),
        ("AUDIO/WAV", "audio/wav"), ("audio/ogg, */*;q=0.5", "audio/ogg"),
        ("audio/flac;q=0.4, audio/aac;q=0.9", "audio/aac"), ("audio/flac;q=0, */*", "audio/mpeg"),
        ("audio/flac;q=nonsense", "audio/mpeg"), ("text/event-stream", "text/event-stream"),
        ("text/html, application/json", "audio/mpeg"),
    ],
)  # fmt: skip
def test_the_accept_header_speaks_where_the_body_is_silent(accept: str, expected: str) -> None:
    assert content_type(accept) == expected


def test_the_body_wins_but_its_format_leaves_the_framing_to_the_header() -> None:
    assert content_type("text/event-stream", response_format="wav") == "text/event-stream"
    assert content_type("audio/wav", response_format="opus") == "audio/ogg"
    assert content_type("audio/L16", response_format="pcm") == "audio/pcm;rate=24000;channels=1"
    assert content_type("text/event-stream", stream_format="audio", response_format="aac") == "audio/aac"
    assert content_type("audio/wav", stream_format="sse") == "text/event-stream"


def test_an_event_stream_carries_the_format_that_the_header_asks_for() -> None:
    delivery = negotiate(SpeechBody.model_validate({"input": "x", "stream_format": "sse"}), "audio/wav")
    assert (delivery.audio_format, delivery.events) == ("wav", True)


def test_each_stage_lasts_from_the_mark_before_it() -> None:
    marks = (("received", 5_000_000_000), ("request", 5_001_500_000), ("to-talker", 5_001_750_000))
    assert server_timing(marks) == 'received;desc="5.000000", request;dur=1.500, to-talker;dur=0.250'


def test_only_marked_requests_are_marked_further() -> None:
    request = SynthesisRequest("r", "Hello.")
    assert with_mark(request, "to-codec") is request
    on_its_way = start_marks(Utterance(request), 1).synthesis
    assert [stage for stage, _ in with_mark(on_its_way, "to-codec").marks] == ["received", "request", "to-codec"]


async def test_the_header_tells_of_the_first_marks_that_came_back() -> None:
    request = start_marks(Utterance(SynthesisRequest("r", "Hello.")), 0).synthesis
    script = [PcmChunk(b"12", CODES, 1, marks=request.marks), PcmChunk(b"34", CODES, 1, marks=request.marks)]
    script = [with_mark(each, stage) for each, stage in zip(script, ("from-talker", "of-a-later-segment"), strict=True)]
    usage, sent = Usage(tells_timing=True), list[Message]()
    rendering = Rendering(AudioOptions(AudioFormat.PCM), 24000, 1920)
    body = audio_body(FakeSynthesizer(script=script).synthesize(request), rendering, usage)

    async def receive() -> Message:
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    await SpeechResponse(body, {}, usage=usage)({}, receive, send)
    entries = dict(sent[0]["headers"])[b"server-timing"].decode().split(", ")
    assert [entry.partition(";")[0] for entry in entries] == ["received", "request", "from-talker", "response"]
    assert b"".join(message["body"] for message in sent[1:]) == b"1234"
