import pytest

from serve_app.delivery import negotiate
from serve_app.schemas import SpeechBody


def content_type(accept: str, **fields: object) -> str:
    return negotiate(SpeechBody.model_validate({"input": "x", **fields}), accept).content_type(24000)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "audio/mpeg"),
        ("*/*", "audio/mpeg"),
        ("application/octet-stream", "audio/mpeg"),
        ("audio/L16", "audio/L16;rate=24000;channels=1"),
        ("audio/pcm;rate=24000", "audio/pcm;rate=24000;channels=1"),
        ("AUDIO/WAV", "audio/wav"),
        ("audio/ogg, */*;q=0.5", "audio/ogg"),
        ("audio/flac;q=0.4, audio/aac;q=0.9", "audio/aac"),
        ("audio/flac;q=0, */*", "audio/mpeg"),
        ("audio/flac;q=nonsense", "audio/mpeg"),
        ("text/event-stream", "text/event-stream"),
        ("text/html, application/json", "audio/mpeg"),
    ],
)
def test_the_accept_header_speaks_where_the_body_is_silent(accept: str, expected: str) -> None:
    assert content_type(accept) == expected


def test_the_body_wins() -> None:
    assert content_type("audio/wav", response_format="opus") == "audio/ogg"
    assert content_type("audio/L16", response_format="pcm") == "audio/pcm;rate=24000;channels=1"
    assert content_type("text/event-stream", stream_format="audio", response_format="aac") == "audio/aac"
    assert content_type("audio/wav", stream_format="sse") == "text/event-stream"


def test_a_format_in_the_body_leaves_the_framing_to_the_header() -> None:
    assert content_type("text/event-stream", response_format="wav") == "text/event-stream"


def test_an_event_stream_carries_the_format_that_the_header_asks_for() -> None:
    delivery = negotiate(SpeechBody.model_validate({"input": "x", "stream_format": "sse"}), "audio/wav")
    assert (delivery.audio_format, delivery.events) == ("wav", True)
