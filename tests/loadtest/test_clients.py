import struct

import pytest

from loadtest.clients import AudioFormat, NotAudioError, PcmBody, Target, WavBody, error_message, open_body, retry_after
from loadtest.traces import PcmLayout, ScheduledRequest

AUDIO = bytes(range(64))


def wav(audio_bytes: int, *, bits: int = 16, extra: bytes = b"") -> bytes:
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 2, 16000, 64000, 4, bits)
    return b"RIFF\xff\xff\xff\xffWAVE" + extra + fmt + struct.pack("<4sI", b"data", audio_bytes)


@pytest.mark.parametrize("cut", [1, 3, 50, 1000])
@pytest.mark.parametrize("audio_bytes", [0, 0xFFFFFFFF, len(AUDIO)])
def test_wav_is_the_same_for_any_cutting(cut: int, audio_bytes: int) -> None:
    data = wav(audio_bytes, extra=b"LIST\x03\x00\x00\x00abc\x00") + AUDIO
    body = WavBody()
    assert b"".join(body.feed(data[start : start + cut]) for start in range(0, len(data), cut)) == AUDIO
    assert body.layout == PcmLayout(16000, 2)


def test_chunks_behind_the_wav_audio_are_no_audio() -> None:
    body = WavBody()
    assert body.feed(wav(8) + AUDIO) == AUDIO[:8]
    assert body.feed(AUDIO) == b""


@pytest.mark.parametrize("data", [b"ID3\x04", b"RIFF\x00\x00\x00\x00AVI ", wav(0, bits=24) + AUDIO])
def test_what_is_not_16_bit_wav_is_refused(data: bytes) -> None:
    with pytest.raises(NotAudioError):
        WavBody().feed(data)


@pytest.mark.parametrize(
    ("headers", "layout"),
    [
        ({}, PcmLayout(24000)),
        ({"Content-Type": "application/octet-stream"}, PcmLayout(24000)),
        ({"Content-Type": "audio/pcm", "X-Sample-Rate": "16000"}, PcmLayout(16000)),
        ({"Content-Type": "audio/L16; rate=8000; channels=2", "X-Sample-Rate": "16000"}, PcmLayout(8000, 2)),
    ],
)
def test_headers_give_the_layout_of_pcm(headers: dict[str, str], layout: PcmLayout) -> None:
    body = open_body(AudioFormat.PCM, headers)
    assert isinstance(body, PcmBody)
    assert body.layout == layout


@pytest.mark.parametrize("content_type", ["audio/mpeg", "text/event-stream", "audio/pcm;rate=fast", "audio/pcm;rate=0"])
def test_other_content_is_not_taken_for_pcm(content_type: str) -> None:
    with pytest.raises(NotAudioError):
        open_body(AudioFormat.PCM, {"Content-Type": content_type})


@pytest.mark.parametrize("base_url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_url_may_be_given_as_openai_clients_have_it(base_url: str) -> None:
    target = Target(base_url, AudioFormat.WAV, {"voice": "sol"}, 1.0)
    assert target.speech_url == "http://h:1/v1/audio/speech"
    assert target.body(ScheduledRequest(0, 0.0, "Hi.")) == {"voice": "sol", "input": "Hi.", "response_format": "wav"}


def test_error_messages_are_found_in_the_envelope_or_taken_as_they_are() -> None:
    assert error_message(b'{"error": {"message": "busy"}}') == "busy"
    assert error_message(b"\xffBad gateway") == "\ufffdBad gateway"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "2"}, 2.0),
        ({"Retry-After": "2", "retry-after-ms": "1500"}, 1.5),
        ({"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}, None),
        ({}, None),
    ],
)
def test_the_advice_of_a_refusal_is_read(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds
