import io
import math
import struct
import wave

import av
import numpy as np
import pytest
import soundfile

from serve_app.api.resolve.speech_request import RAW
from serve_app.audio import formats
from serve_app.audio.formats import AudioFormat, AudioOptions, Filter, Rendering, open_encoder
from tests.serve_app.fake import CUSTOM_VOICE, tone

pytestmark = pytest.mark.anyio

RATE, FRAME = CUSTOM_VOICE.sample_rate, CUSTOM_VOICE.frame_samples
SECONDS = 2
CONTAINERS = [audio_format for audio_format in AudioFormat if audio_format not in RAW]


def encoder_for(
    audio_format: AudioFormat, num_bytes: int | None = None
) -> formats.RawEncoder | formats.CompressedEncoder:
    return open_encoder(AudioOptions(audio_format), RATE, frame_samples=FRAME, num_bytes=num_bytes)


def encode(audio_format: AudioFormat, pcm: bytes, piece_samples: int = FRAME) -> list[bytes]:
    """What each piece made available, and last what `close` did."""
    encoder = encoder_for(audio_format)
    size = piece_samples * 2
    return [*(encoder.encode(pcm[start : start + size]) for start in range(0, len(pcm), size)), encoder.close()]


def decode(data: bytes) -> tuple[np.ndarray, int]:
    with av.open(io.BytesIO(data), mode="r") as container:
        resampler = av.AudioResampler(format="s16", layout="mono")
        frames = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)]
    return np.concatenate([frame.to_ndarray()[0] for frame in frames]), frames[0].sample_rate


def pitch(samples: np.ndarray, rate: int) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(samples.size)))
    return float(spectrum.argmax() * rate / samples.size)


@pytest.mark.parametrize("audio_format", CONTAINERS)
def test_a_stream_decodes_to_the_same_sound(audio_format: AudioFormat) -> None:
    samples, rate = decode(b"".join(encode(audio_format, tone(RATE * SECONDS))))
    coder_delay = 2 * 1152 if audio_format in (AudioFormat.MP3, AudioFormat.AAC) else 0
    assert 0 <= samples.size * RATE / rate - RATE * SECONDS <= coder_delay
    middle = samples[rate // 2 : rate * 3 // 2].astype(float)
    assert pitch(middle, rate) == pytest.approx(440, abs=2)
    assert np.sqrt(np.mean(middle**2)) == pytest.approx(9000 / np.sqrt(2), rel=0.1)


@pytest.mark.parametrize("audio_format", [AudioFormat.MP3, AudioFormat.OPUS, AudioFormat.WAV])
def test_soundfile_reads_the_stream(audio_format: AudioFormat) -> None:
    samples, rate = soundfile.read(io.BytesIO(b"".join(encode(audio_format, tone(RATE * SECONDS)))))
    assert samples.size / rate == pytest.approx(SECONDS, abs=0.1)


@pytest.mark.parametrize("audio_format", [AudioFormat.FLAC, AudioFormat.WAV])
async def test_lossless_formats_keep_every_sample_also_in_a_whole_body(audio_format: AudioFormat) -> None:
    pcm = tone(RATE + 777)
    assert decode(b"".join(encode(audio_format, pcm)))[0].tobytes() == pcm
    rendering = Rendering(AudioOptions(audio_format, whole=True), RATE, FRAME)
    body = await rendering.feed(pcm) + await rendering.close()
    assert soundfile.info(io.BytesIO(body)).frames == RATE + 777
    assert soundfile.read(io.BytesIO(body), dtype="int16")[0].tobytes() == pcm


@pytest.mark.parametrize("audio_format", AudioFormat)
def test_bytes_come_while_audio_comes(audio_format: AudioFormat) -> None:
    *early, _ = encode(audio_format, tone(RATE * SECONDS))
    assert any(early[:2])  # AAC holds back one frame
    assert all(early[2:])


@pytest.mark.parametrize("audio_format", AudioFormat)
def test_the_stream_does_not_depend_on_how_the_audio_is_cut(audio_format: AudioFormat) -> None:
    in_pieces, at_once = (b"".join(encode(audio_format, tone(RATE), size)) for size in (1000, RATE))
    if audio_format is not AudioFormat.OPUS:  # an Ogg stream has a random serial number
        assert in_pieces == at_once
    if audio_format not in RAW:
        np.testing.assert_array_equal(decode(in_pieces)[0], decode(at_once)[0])


@pytest.mark.parametrize("audio_format", AudioFormat)
def test_no_audio_makes_no_bytes_before_close(audio_format: AudioFormat) -> None:
    encoder = encoder_for(audio_format)
    assert encoder.encode(b"") == b""
    assert encoder.encode(tone(3 * FRAME)) != b""


def test_a_streamed_wav_has_unknown_sizes_and_a_whole_one_exact_sizes() -> None:
    assert len(encoder_for(AudioFormat.WAV).close()) == 44
    pcm = tone(1000)
    streamed = b"".join(encode(AudioFormat.WAV, pcm))
    assert struct.unpack_from("<I", streamed, 4) == struct.unpack_from("<I", streamed, 40) == (0xFFFFFFFF,)
    encoder = encoder_for(AudioFormat.WAV, len(pcm))
    whole = encoder.encode(pcm) + encoder.close()
    assert struct.unpack_from("<I", whole, 4) == (len(whole) - 8,)
    with wave.open(io.BytesIO(whole)) as file:
        assert (file.getnframes(), file.getframerate(), file.getsampwidth()) == (1000, RATE, 2)


def test_a_rate_that_opus_does_not_know_is_resampled() -> None:
    encoder = open_encoder(AudioOptions(AudioFormat.OPUS), 22050, frame_samples=FRAME)
    samples, rate = decode(encoder.encode(tone(22050, sample_rate=22050)) + encoder.close())
    assert samples.size / rate == pytest.approx(1, abs=0.001)
    assert pitch(samples.astype(float), rate) == pytest.approx(440, abs=2)


def stretch(pcm: bytes, speed: float, piece_samples: int = FRAME) -> bytes:
    tempo, size = Filter(RATE, speed=speed), piece_samples * 2
    return b"".join([tempo.feed(pcm[start : start + size]) for start in range(0, len(pcm), size)]) + tempo.close()


@pytest.mark.parametrize("speed", [0.25, 0.5, 0.8, 1.25, 2.0, 3.0, 4.0])
def test_duration_changes_and_pitch_stays(speed: float) -> None:
    samples = np.frombuffer(stretch(tone(3 * RATE), speed), "<i2").astype(float)
    assert samples.size / RATE * speed == pytest.approx(3, rel=0.02)
    assert pitch(samples, RATE) == pytest.approx(440, abs=3)


@pytest.mark.parametrize("speed", [0.7, 1.3])
def test_the_result_does_not_depend_on_how_the_audio_is_cut(speed: float) -> None:
    assert stretch(tone(RATE), speed, 700) == stretch(tone(RATE), speed, RATE)


@pytest.mark.parametrize("num_samples", [FRAME, RATE])
def test_little_is_held_back(num_samples: int) -> None:
    tempo = Filter(RATE, speed=1.25)
    stretched = len(tempo.feed(tone(num_samples)) + tempo.feed(tone(num_samples, start=num_samples))) // 2
    assert stretched >= (2 * num_samples - 0.1 * RATE) / 1.25


def test_nothing_in_nothing_out() -> None:
    tempo = Filter(RATE, speed=1.25)
    assert tempo.feed(b"") + tempo.close() == b""


@pytest.mark.parametrize("speed", [0.25, 0.49, 0.5, 1.0, 2.0, 2.01, 4.0])
def test_every_step_is_one_that_atempo_does_well(speed: float) -> None:
    assert math.prod(formats.factors(speed)) == pytest.approx(speed)
    assert all(0.5 <= factor <= 2 for factor in formats.factors(speed))


@pytest.mark.parametrize(("audio_format", "codec"), [(AudioFormat.MULAW, "pcm_mulaw"), (AudioFormat.ALAW, "pcm_alaw")])
def test_telephone_bytes_are_those_of_ffmpeg(audio_format: AudioFormat, codec: str) -> None:
    every_sample = np.arange(-32768, 32768, dtype=np.int16)
    ours = np.frombuffer(encoder_for(audio_format).encode(every_sample.astype("<i2").tobytes()), np.uint8)
    decoder = av.CodecContext.create(codec, "r")
    decoder.sample_rate, decoder.layout = RATE, "mono"
    frames = [frame.to_ndarray()[0] for frame in decoder.decode(av.Packet(ours.tobytes()))]
    error = np.abs(np.concatenate(frames).astype(np.int32) - every_sample)
    # Half a step of the segment that a sample is in, and what is louder than the law has.
    assert (error <= np.maximum(np.abs(every_sample.astype(np.int32)) / 32 + 9, 0))[200:-200].all()
    assert np.unique(ours).size == 256


def test_floats_are_the_samples() -> None:
    pcm = tone(1000)
    floats = np.frombuffer(b"".join(encode(AudioFormat.FLOAT, pcm)), "<f4")
    assert (floats * 32768 == np.frombuffer(pcm, "<i2")).all()


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
def test_another_rate_is_the_same_tone(rate: int) -> None:
    resampler = Filter(RATE, output_rate=rate)
    pcm = tone(RATE)
    pieces = [resampler.feed(pcm[start : start + 2 * FRAME]) for start in range(0, len(pcm), 2 * FRAME)]
    assert len(pieces[0]) / 2 / rate > FRAME / RATE - 0.006  # hardly anything is held back
    samples = np.frombuffer(b"".join([*pieces, resampler.close()]), "<i2")
    assert abs(samples.size - rate) <= 2
    assert pitch(samples[rate // 4 : rate * 3 // 4].astype(float), rate) == pytest.approx(440, abs=2)
    whole = Filter(RATE, output_rate=rate)
    assert whole.feed(pcm) + whole.close() == samples.tobytes()


async def test_a_rendering_that_is_drained_goes_on_afresh() -> None:
    rendering = Rendering(AudioOptions(AudioFormat.PCM, speed=2.0, sample_rate=8000), RATE, FRAME)
    turns = [await rendering.feed(tone(RATE)) + await rendering.drain() for _ in range(2)]
    assert turns[0] == turns[1]
    assert len(turns[0]) / 2 == pytest.approx(4000, abs=80)
    assert rendering.samples == len(b"".join(turns)) // 2
    assert await rendering.close() == b""


@pytest.mark.parametrize("bit_rate", [None, 32_000, 320_000])
@pytest.mark.parametrize(("rate", "seconds"), [(24000, 3.77), (8000, 1.0), (44100, 0.5), (48000, 0.013)])
def test_a_whole_mp3_says_its_length(rate: int, seconds: float, bit_rate: int | None) -> None:
    pcm = tone(int(rate * seconds), sample_rate=rate)
    for disclosed in (False, True):
        form = AudioOptions(AudioFormat.MP3, bit_rate=bit_rate, disclosed=disclosed)
        whole = open_encoder(form, rate, frame_samples=rate // 12, num_bytes=len(pcm))
        streamed = open_encoder(form, rate, frame_samples=rate // 12)
        files = [b"".join((each.encode(pcm[:500]), each.encode(pcm[500:]), each.close())) for each in (whole, streamed)]
        assert [b"Xing" in file[:1000] or b"Info" in file[:1000] for file in files] == [True, False]
        assert [file.startswith(b"ID3") for file in files] == [disclosed, disclosed]
        with av.open(io.BytesIO(files[0])) as container:
            assert container.duration == pytest.approx(len(pcm) // 2 / rate * 1e6, abs=1e6 / rate)
            assert sum(frame.samples for frame in container.decode(audio=0)) == len(pcm) // 2


DISCLOSING = [AudioFormat.MP3, AudioFormat.OPUS, AudioFormat.FLAC, AudioFormat.WAV]


@pytest.mark.parametrize("num_bytes", [None, 2 * RATE])
@pytest.mark.parametrize("audio_format", DISCLOSING)
def test_tags_say_that_speech_is_synthetic_and_delay_nothing(audio_format: AudioFormat, num_bytes: int | None) -> None:
    told, bare = (
        open_encoder(AudioOptions(audio_format, disclosed=disclosed), RATE, frame_samples=FRAME, num_bytes=num_bytes)
        for disclosed in (True, False)
    )
    pcm = tone(RATE)
    first, usual = told.encode(pcm[: 2 * FRAME]), bare.encode(pcm[: 2 * FRAME])
    whole, plain = (begin + one.encode(pcm[2 * FRAME :]) + one.close() for begin, one in ((first, told), (usual, bare)))
    is_kept = audio_format is AudioFormat.MP3 and num_bytes is not None  # until its length is in its header
    tag_bytes = len(whole) - len(plain)
    assert tag_bytes > 0
    assert len(first) - len(usual) == (0 if is_kept else tag_bytes), "the same audio is in the first bytes"
    with av.open(io.BytesIO(whole)) as container:
        tags = dict(container.metadata) | dict(container.streams.audio[0].metadata)
    assert "digital_source_type=http://cv.iptc.org/" in tags["comment"]
    assert audio_format is AudioFormat.WAV or tags["digital_source_type"].endswith("/trainedAlgorithmicMedia")
    assert (decode(whole)[0] == decode(plain)[0]).all()


def test_python_reads_a_wav_that_says_it_is_synthetic() -> None:
    encoder = open_encoder(AudioOptions(AudioFormat.WAV, disclosed=True), RATE, frame_samples=FRAME, num_bytes=2 * RATE)
    with wave.open(io.BytesIO(encoder.encode(tone(RATE)) + encoder.close())) as file:
        assert file.readframes(file.getnframes()) == tone(RATE)


@pytest.mark.parametrize("audio_format", [each for each in AudioFormat if each not in DISCLOSING])
def test_formats_without_tags_stay_as_they_are(audio_format: AudioFormat) -> None:
    told, bare = (
        open_encoder(AudioOptions(audio_format, disclosed=disclosed), RATE, frame_samples=FRAME)
        for disclosed in (True, False)
    )
    assert told.encode(tone(RATE)) + told.close() == bare.encode(tone(RATE)) + bare.close()
