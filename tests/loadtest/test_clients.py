import asyncio
import base64
import io
import struct

import pytest
import soundfile as sf

from loadtest.arrivals import ScheduledRequest
from loadtest.clients import error_message, retry_after
from loadtest.recording import NotAudioError, Recording, read_layout
from loadtest.settings import Settings
from loadtest.traces import Clock, PcmLayout


@pytest.mark.parametrize(("headers", "layout"), [
    ({}, PcmLayout(24000)),
    ({"Content-Type": "application/octet-stream"}, PcmLayout(24000)),
    ({"Content-Type": "audio/pcm", "X-Sample-Rate": "16000"}, PcmLayout(16000)),
    ({"Content-Type": "audio/L16; rate=8000; channels=2", "X-Sample-Rate": "16000"}, PcmLayout(8000, 2)),
])  # fmt: skip
def test_headers_give_the_layout_of_pcm(headers: dict[str, str], layout: PcmLayout) -> None:
    assert read_layout(headers) == layout


@pytest.mark.parametrize(
    "content_type",
    ["audio/mpeg", "text/event-stream", "audio/pcm;rate=fast", "audio/pcm;rate=0", f"audio/pcm;rate={'9' * 5000}"],
)
def test_other_content_is_not_taken_for_pcm(content_type: str) -> None:
    with pytest.raises(NotAudioError):
        read_layout({"Content-Type": content_type})


def test_a_length_is_asked_for_with_the_step_that_ends_it() -> None:
    settings = Settings("http://h:1")
    exact = {"max_new_tokens": 72, "ignore_eos": True}
    assert settings.body(ScheduledRequest(0, 0.0, "Hi.", frames=71)).items() >= exact.items()
    assert not settings.body(ScheduledRequest(0, 0.0, "Hi.")).keys() & exact.keys()


@pytest.mark.parametrize(("recordings", "distinct"), [(0, 4), (1, 1), (3, 3)])
def test_requests_clone_recordings(recordings: int, distinct: int) -> None:
    settings = Settings("http://server", recording_s=0.5, recordings=recordings)
    bodies = [settings.body(ScheduledRequest(number, 0.0, "Hi.")) for number in range(4)]
    audio, rate = sf.read(io.BytesIO(base64.b64decode(str(bodies[0]["ref_audio"]).partition(",")[2])))
    assert (audio.shape, rate, len({body["ref_audio"] for body in bodies})) == ((12_000,), 24_000, distinct)
    assert bodies[0]["ref_text"]


@pytest.mark.parametrize("base_url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_url_may_be_given_as_openai_clients_have_it(base_url: str) -> None:
    target = Settings(base_url, options={"voice": "sol"})
    assert target.speech_url == "http://h:1/v1/audio/speech"
    assert target.body(ScheduledRequest(0, 0.0, "Hi.")) == {"voice": "sol", "input": "Hi.", "response_format": "pcm"}


def test_error_messages_are_found_in_the_envelope_or_taken_as_they_are() -> None:
    assert error_message(b'{"error": {"message": "busy"}}') == "busy"
    assert error_message(b"\xffBad gateway") == "\ufffdBad gateway"


@pytest.mark.parametrize(("headers", "seconds"), [
    ({"Retry-After": "2"}, 2.0), ({"Retry-After": "2", "retry-after-ms": "1500"}, 1.5),
    ({"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}, None), ({}, None),
])  # fmt: skip
def test_the_advice_of_a_refusal_is_read(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


def header(bits: int = 16, extra: bytes = b"", rate: int = 16000) -> bytes:
    form = struct.pack("<IHHIIHH", 16, 1, 2, rate, 64000, 4, bits)
    return b"RIFF\xff\xff\xff\xffWAVEfmt " + form + extra + b"data\xff\xff\xff\xff"


def read_header(data: bytes) -> tuple[PcmLayout | None, bytes]:
    async def read() -> tuple[PcmLayout | None, bytes]:
        content = asyncio.StreamReader()
        content.feed_data(data)
        content.feed_eof()
        recording = Recording(ScheduledRequest(0, 0.0, "Hi."), Clock.started())
        await recording.read_wav_header(content)
        return recording.trace.layout, await content.read()

    return asyncio.run(read())


def test_a_wav_file_that_streams_begins_behind_its_header() -> None:
    assert read_header(header(extra=b"LIST\x02\x00\x00\x00ab") + b"samples") == (PcmLayout(16000, 2), b"samples")


@pytest.mark.parametrize(("data", "reason"), [
    *((data, "streamed WAV file") for data in (b"", b"{" * 40, header(bits=24), header()[:20])),
    (header(rate=0), "sample rate 0"),
])  # fmt: skip
def test_what_is_no_wav_file_of_16_bits_is_not_taken_for_one(data: bytes, reason: str) -> None:
    with pytest.raises(NotAudioError, match=reason):
        read_header(data)
