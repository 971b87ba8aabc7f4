import base64
import io
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile

from deployments.errors import InvalidRequest, PayloadTooLarge
from deployments.protocol import ClonePrompt, Reference
from deployments.recording_cache import RecordingCache
from serve_app.audio import clone_prompts, recordings
from serve_app.audio.clone_prompts import Decode, store_clone_prompt, with_prompt
from serve_app.audio.recordings import decode_reference, prepare_reference
from tests.serve_app.audio.test_formats import pitch
from tests.serve_app.fake import BASE, tone

pytestmark = pytest.mark.anyio

RATE = 24000


def recording(seconds: float = 1.0, *, rate: int = RATE, channels: int = 1, container: str = "WAV") -> bytes:
    signal = 0.3 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)
    return file_of(np.repeat(signal[:, None], channels, axis=1), rate, container)


def file_of(signal: np.ndarray, rate: int = RATE, container: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, signal, rate, format=container, subtype=subtype)
    return file.getvalue()


def data_url(data: bytes) -> str:
    return "data:audio/wav;base64," + base64.b64encode(data).decode()


def decode(ref_audio: str) -> np.ndarray:
    return decode_reference(ref_audio, RATE)


@pytest.mark.parametrize("container", ["WAV", "FLAC", "MP3", "OGG", "AIFF"])
@pytest.mark.parametrize("channels", [1, 2])
def test_any_container_becomes_mono_at_the_models_rate(container: str, channels: int) -> None:
    audio = decode(data_url(recording(rate=44100, channels=channels, container=container)))
    assert (audio.dtype, audio.ndim) == (np.float32, 1)
    assert audio.size / RATE == pytest.approx(1, abs=0.06)
    assert pitch(audio, RATE) == pytest.approx(440, abs=2)
    assert np.abs(audio).max() == pytest.approx(0.3, abs=0.05)


def test_samples_at_the_models_rate_are_kept() -> None:
    expected, _ = soundfile.read(io.BytesIO(recording()), dtype="float32")
    np.testing.assert_array_equal(decode(data_url(recording())), expected)


@pytest.mark.parametrize("subtype", [*recordings._PLAIN_WAV, "ULAW", "ALAW"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_wav_says_the_same_to_both_readers(subtype: str, channels: int) -> None:
    """libsndfile reads plain samples, FFmpeg everything."""
    signal = np.random.default_rng(0).uniform(-1, 1, (RATE, channels)).astype(np.float32)
    file = file_of(signal, 44100, subtype=subtype)
    read, (exact, rate) = recordings._read_wav(file, "ref_audio"), recordings._decode(file, "ref_audio")
    assert (read is None) == (subtype not in recordings._PLAIN_WAV)
    if read is not None:
        assert read[1] == rate
        np.testing.assert_array_equal(read[0], exact)


@pytest.mark.parametrize(("container", "channels"), [("WAV", 2), ("FLAC", 2), ("FLAC", recordings.MAX_CHANNELS)])
def test_channels_are_averaged(container: str, channels: int) -> None:
    signal = np.zeros((RATE, channels))
    signal[:, 0] = 0.5
    np.testing.assert_allclose(decode(data_url(file_of(signal, container=container))), 0.5 / channels)


def test_plain_base64_is_accepted_with_line_breaks() -> None:
    assert decode(base64.encodebytes(recording()).decode()).size == RATE


@pytest.mark.parametrize(
    "ref_audio",
    [
        "", "http://example.com/a.wav", "https://example.com/a.wav", "file:///etc/passwd", "/etc/passwd", "/tmp/a/b",
        "data:audio/wav,RIFF", "data:audio/wav;base64", "data:audio/wav;base64,@@@", "data:audio/wav;base64,é",
        data_url(b"no audio at all"), data_url(recording()[:60]), data_url(zlib.compress(b"x" * 100)),
    ],
)  # fmt: skip
def test_what_is_no_audio_is_the_clients_error(ref_audio: str) -> None:
    with pytest.raises(InvalidRequest, match="ref_audio cannot be used") as raised:
        decode(ref_audio)
    assert raised.value.param == "ref_audio"


def test_a_playlist_does_not_open_the_files_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner.wav").write_bytes(recording())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest):
        decode(data_url(b"ffconcat version 1.0\nfile inner.wav\n"))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Whoever connects to it has opened a URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.mark.parametrize(
    "ref_audio",
    [
        "http://127.0.0.1:{port}/a.wav", "HTTP://127.0.0.1:{port}/a.wav", "http://localhost:{port}/redirect",
        "http://[::ffff:127.0.0.1]:{port}/", "http://2130706433:{port}/", "http://rebound.example.com:{port}/",
        "ftp://127.0.0.1:{port}/a.wav", "tcp://127.0.0.1:{port}", "concat:http://127.0.0.1:{port}/a.wav",
        "data:audio/wav;base64,http://127.0.0.1:{port}/a.wav",
    ],
)  # fmt: skip
def test_no_url_is_opened(listener: socket.socket, ref_audio: str) -> None:
    opens_nothing(ref_audio.format(port=listener.getsockname()[1]), listener)


@pytest.mark.parametrize(
    "content",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{url}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile {url}\n",
        '<MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><Period><BaseURL>{url}</BaseURL></Period></MPD>',
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\na=control:{url}\n",
        "[playlist]\nFile1={url}\nNumberOfEntries=1\n",
    ],
)
def test_no_url_inside_a_file_is_opened(listener: socket.socket, content: str) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/a.wav"
    opens_nothing(data_url(content.replace("{url}", url).encode()), listener)


def opens_nothing(ref_audio: str, listener: socket.socket) -> None:
    with pytest.raises(InvalidRequest, match="ref_audio cannot be used"):
        decode(ref_audio)
    with pytest.raises(BlockingIOError):
        listener.accept()


def frame_of(samples: np.ndarray, rate: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
    frame.sample_rate = rate
    return frame


@pytest.mark.parametrize(("container", "codec"), [("webm", "libopus"), ("mp4", "aac")])
def test_what_browsers_and_phones_record(container: str, codec: str) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=48000, layout="mono")
        samples = np.frombuffer(tone(48000, sample_rate=48000), "<i2")
        output.mux([*stream.encode(frame_of(samples, 48000)), *stream.encode(None)])
    audio = decode(data_url(file.getvalue()))
    assert audio.size / RATE == pytest.approx(1, abs=0.06)
    assert pitch(audio, RATE) == pytest.approx(440, abs=2)


async def test_what_was_sent_before_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []

    def note(ref_audio: str, sample_rate: int, decode: Decode) -> np.ndarray:
        decoded.append(ref_audio)
        return decode_reference(ref_audio, sample_rate, decode)

    monkeypatch.setattr(recordings, "decode_reference", note)
    one, other = (data_url(recording(seconds)) for seconds in (1.125, 1.375))
    asked = ((one, RATE), (one, RATE), (one, 8000), (other, RATE))
    infos = [(sent, replace(BASE, sample_rate=rate)) for sent, rate in asked]
    references = [await prepare_reference(sent, "Said.", info, x_vector_only=False) for sent, info in infos]
    assert [len(reference.samples) for reference in references] == [27000, 27000, 9000, 33000]
    first, again, *others = (reference.key for reference in references)
    assert first == again
    assert len({first, *others}) == 3
    assert decoded == [one, one, other]
    with pytest.raises(InvalidRequest):
        await prepare_reference("\ud800", "Said.", BASE, x_vector_only=False)


SPEAKER = np.arange(4, dtype=np.float32)
CODES = np.arange(32, dtype=np.int16).reshape(2, 16)


async def read(ref_audio: str, name: str, *, x_vector_only: bool = False) -> Reference:
    return await prepare_reference(ref_audio, "Said.", replace(BASE, name=name), x_vector_only=x_vector_only)


async def test_what_replicas_made_of_a_recording_stands_for_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    ref_audio = data_url(recording(0.625))
    store_clone_prompt(await read(ref_audio, "prompts"), ClonePrompt(SPEAKER, CODES))
    monkeypatch.setattr(recordings, "decode_reference", None)  # not even where samples have been forgotten
    monkeypatch.setattr(recordings, "_DECODED", RecordingCache(max_bytes=0, size=lambda audio: audio.nbytes))
    for x_vector_only in (False, True):
        known = await read(ref_audio, "prompts", x_vector_only=x_vector_only)
        assert known.audio is None
        assert known.prompt is not None
        np.testing.assert_equal((known.prompt.speaker, known.prompt.codes), (SPEAKER, CODES))


async def test_another_model_is_asked_with_samples() -> None:
    ref_audio = data_url(recording(0.625))
    store_clone_prompt(await read(ref_audio, "one model"), ClonePrompt(SPEAKER, CODES))
    assert (await read(ref_audio, "another model")).audio is not None


async def test_a_speaker_vector_is_no_prompt_for_a_clone_in_context() -> None:
    ref_audio = data_url(recording(0.75))
    store_clone_prompt(await read(ref_audio, "vector", x_vector_only=True), ClonePrompt(SPEAKER))
    assert (await read(ref_audio, "vector", x_vector_only=True)).audio is None
    in_context = await read(ref_audio, "vector")
    assert in_context.audio is not None
    for codes in (CODES, None, CODES + 1):  # the first codes stay
        store_clone_prompt(in_context, ClonePrompt(SPEAKER, codes))
    prompt = with_prompt(in_context).prompt
    assert prompt is not None
    np.testing.assert_equal(prompt.codes, CODES)


async def test_a_prompt_that_has_given_way_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ClonePrompt(SPEAKER, CODES)
    prompts = RecordingCache[ClonePrompt](max_bytes=prompt.nbytes, size=lambda each: each.nbytes)
    monkeypatch.setattr(clone_prompts, "PROMPTS", prompts)
    one, other = (data_url(recording(seconds)) for seconds in (0.625, 0.75))
    for ref_audio in (one, other):
        reference = await read(ref_audio, "small")
        assert reference.audio is not None
        store_clone_prompt(reference, prompt)
    assert (await read(other, "small")).audio is None
    assert (await read(one, "small")).audio is not None


def test_too_short_and_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_SECONDS", 2.0)
    with pytest.raises(InvalidRequest, match=r"shorter than 0\.5 seconds"):
        decode(data_url(recording(0.4)))
    with pytest.raises(InvalidRequest, match="longer than 2 seconds"):
        decode(data_url(recording(2.1)))
    assert decode(data_url(recording(2))).size == 2 * RATE


def test_a_small_file_of_endless_silence_is_given_up() -> None:
    file = file_of(np.zeros(RATE * 3600), container="FLAC")
    assert len(file) < recordings.MAX_BYTES
    with pytest.raises(InvalidRequest, match="longer than 30 seconds"):
        decode(data_url(file))


def with_picture(size: int) -> bytes:
    """A second of silence with a picture of size x size as its other stream, which compresses to almost nothing."""
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as output:
        video, audio = output.add_stream("png", rate=1), output.add_stream("pcm_s16le", rate=RATE, layout="mono")
        video.width, video.height, video.pix_fmt = size, size, "rgb24"
        output.mux([*video.encode(av.VideoFrame(size, size, "rgb24")), *video.encode(None)])
        output.mux([*audio.encode(frame_of(np.zeros(RATE, np.int16), RATE)), *audio.encode(None)])
    return file.getvalue()


MEASURE = """
import resource, sys
from serve_app.audio.recordings import decode_reference
text, small = open(sys.argv[1]).read(), open(sys.argv[2]).read()
decode_reference(small, 24000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert decode_reference(text, 24000).size == 24000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_picture_in_the_file_is_not_decoded(tmp_path: Path) -> None:
    """As pixels it would be 192 MB."""
    for name, content in (("big", with_picture(8000)), ("small", recording())):
        (tmp_path / name).write_text(data_url(content))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "big"), str(tmp_path / "small")]
    kilobytes = int(subprocess.run(command, capture_output=True, check=True).stdout)
    assert kilobytes < 40_000


def test_an_upload_that_takes_too_long_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "TIMEOUT_S", 1e-9)
    with pytest.raises(InvalidRequest, match="takes longer than"):
        decode(data_url(recording(container="FLAC")))


def test_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = recording()
    monkeypatch.setattr(recordings, "MAX_BYTES", len(data) - 3)
    with pytest.raises(PayloadTooLarge) as raised:
        decode(data_url(data))
    assert raised.value.param == "ref_audio"
    monkeypatch.setattr(recordings, "MAX_BYTES", len(data))
    assert decode(data_url(data)).size == decode(data_url(recording(rate=8000))).size == RATE


@pytest.mark.parametrize(("content", "message"), [
    (recording(0), "ref_audio cannot be used"),  # its sample rate is unknown too: no multiple of it is a length
    (recording(channels=32), "channels"), (recording(rate=1000), "4000 to 192000 Hz"),
    (recording(rate=48000, container="MP3") + recording(rate=32000, container="MP3"), "the sample rate changes"),
    *((file_of(np.full(RATE, sample), subtype="FLOAT"), r"the samples exceed full scale \(1.0\) or are not finite")
      for sample in (np.nan, np.inf, 1e20, -3e38)),
])  # fmt: skip
def test_recordings_of_which_no_voice_can_be_made(content: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        decode(data_url(content))


def test_samples_of_16_bits_as_floats_are_read() -> None:
    assert abs(decode(data_url(file_of(np.full(RATE, -32768.0), subtype="FLOAT")))).max() > 32000
