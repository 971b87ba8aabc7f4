"""Compare speech on both sides of a joint: between segments with and without tails, and within segments.

    python -m tools.listening.joints --joints 50

The engine in this process speaks pairs of held-out sentences: the second sentence alone, the second sentence continuing
the tail of the first, and both as one segment. A recogniser transcribes the speech after each joint.
"""

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from deployments.codec.backends.registry import load_decoder
from deployments.codec.decoder import CodecDecoder
from deployments.config import TalkerConfig
from deployments.protocol import Codes, FinishReason, PcmChunk, Reading, SynthesisRequest
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine
from deployments.weights.store import locate
from serve_app.speech.segments import StreamTail, segment_seed
from talkray_tools.recogniser import Moonshine, Whisper, plain_words, word_errors
from talkray_tools.spoken_texts import SENTENCES
from talkray_tools.ways import sounding
from tools.listening.texts import texts

logger = logging.getLogger(__name__)

_RATE = 24000
_LOUD_S, _PITCH_S = 0.3, 1.0  # seconds of each side to compare loudness, and to compare pitch and spectrum
_FLOOR_DB, _BANDS = -60.0, 40
_NEAR_FRAMES = 6  # search range for the beginning of a sentence, around its estimated frame
Audio = NDArray[np.float32]


@dataclass(slots=True)
class Joint:
    """Two sentences, and the samples before and after the joint for each of three methods."""

    voice: str
    texts: tuple[str, str]
    sides: dict[str, tuple[Audio, Audio]]
    reasons: dict[str, FinishReason]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--joints", type=int, default=50)
    parser.add_argument("--instructions", nargs="*", default=[None], help="for the second sentences, in turn")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    joints = spoken(options.model, options.joints, options.instructions)
    logger.info("| between | steps | loudness, dB | pitch, semitones | spectrum, dB | quiet, ms |")
    logger.info("|---|---|---|---|---|---|")
    for way in joints[0].sides:
        pairs = [joint.sides[way] for joint in joints if way in joint.sides]
        steps = [[measure(*pair) for pair in pairs] for measure in (loudness_step, pitch_step, spectrum_step, quiet_ms)]
        medians = [f"{np.nanmedian(each):.2f} ({np.nanquantile(each, 0.9):.2f})" for each in steps]
        logger.info(f"| {way} | {len(pairs)} | {' | '.join(medians)} |")
    logger.info({way: [joint.reasons[way].value for joint in joints].count("stop") for way in joints[0].reasons})
    for recogniser in (Whisper(), Moonshine()):
        for way in joints[0].reasons:
            errors = [_errors(recogniser.transcribe, joint, way) for joint in joints]
            words = sum(len(plain_words(joint.texts[1], "english")) for joint in joints)
            logger.info(f"{recogniser.name}, {way}: {sum(errors)} of {words} words wrong")


def _errors(transcribe: Callable[[Audio, int], str], joint: Joint, way: str) -> int:
    heard = plain_words(transcribe(joint.sides[way][1], _RATE), "english")
    return word_errors(plain_words(joint.texts[1], "english"), heard)


def spoken(model: str, num_joints: int, instructions: Sequence[str | None]) -> list[Joint]:
    """Generate the joints of each voice, with the `instructions` for the second sentences in turn."""
    directory = locate(model)
    engine = build_engine(directory, TalkerConfig(device="cpu", max_num_seqs=8, max_num_waiting=num_joints))
    decoder = load_decoder(directory / "speech_tokenizer")
    sentences = [text.spoken for text in texts("english") if text.kind == SENTENCES]
    pairs = list(islice(pairwise(cycle(sentences)), num_joints))
    voices = [engine.info.voices[place % len(engine.info.voices)] for place in range(num_joints)]
    asked = [
        SynthesisRequest(str(seed), first, voice=voice, seed=seed, word_times=True)
        for seed, ((first, _), voice) in enumerate(zip(pairs, voices, strict=True))
    ]
    firsts = speak_all(engine, asked)
    alone = [
        replace(request, text=second, seed=segment_seed(request.seed, 1), instructions=style)
        for request, (_, second), style in zip(asked, pairs, cycle(instructions), strict=False)
    ]
    ends = [StreamTail() for _ in asked]
    for end, (codes, reason, _) in zip(ends, firsts, strict=True):
        end.add(PcmChunk(b"", codes, 0, reason))
    joined = [
        replace(request, tail=end.tail(first)) for request, end, (first, _) in zip(alone, ends, pairs, strict=True)
    ]
    logger.info("frames of tails: %s", [0 if each.tail is None else len(each.tail.codes) for each in joined])
    whole = [replace(request, text=" ".join(pair)) for request, pair in zip(asked, pairs, strict=True)]
    joints = [Joint(voice, pair, {}, {}) for voice, pair in zip(voices, pairs, strict=True)]
    for way, requests in (("segments by themselves", alone), ("joined segments", joined)):
        for joint, (before, *_), (after, reason, _) in zip(joints, firsts, speak_all(engine, requests), strict=True):
            joint.sides[way], joint.reasons[way] = (_decoded(decoder, before), _decoded(decoder, after)), reason
    for joint, (codes, _, readings) in zip(joints, speak_all(engine, whole), strict=True):
        frames = _decoded(decoder, codes).reshape(-1, decoder.frame_samples)
        read = next((frame for frame, chars in enumerate(readings) if chars > len(joint.texts[0])), 0)
        if read:
            near = range(max(1, read - _NEAR_FRAMES), min(len(frames) - 1, read + _NEAR_FRAMES))
            cut = min(near, key=lambda frame: float(np.square(frames[frame]).sum()))  # the pause between the sentences
            joint.sides["sentences of one segment"] = frames[:cut].reshape(-1), frames[cut:].reshape(-1)
    return joints


def speak_all(engine: Engine, requests: list[SynthesisRequest]) -> list[tuple[Codes, FinishReason, list[float]]]:
    """Return codes and finish reason of each request, and the number of characters before each frame."""
    codes: dict[int, list[Codes]] = {number: [] for number in range(len(requests))}
    readings: dict[int, list[Reading]] = {number: [] for number in codes}
    reasons: dict[int, FinishReason] = {}
    for number, request in enumerate(requests):
        engine.add(number, request)
    while not engine.is_idle:
        output = engine.step()
        if output.failures:
            raise output.failures[0][1]
        for number, chunk in output.chunks:
            codes[number].append(chunk.codes)
            readings[number] += chunk.readings
            if chunk.finish_reason is not None:
                reasons[number] = chunk.finish_reason
    return [
        (np.concatenate(codes[number]), reasons[number], [char for each in readings[number] for char in each.chars])
        for number in codes
    ]


def _decoded(decoder: CodecDecoder, codes: Codes) -> Audio:
    audio, _ = decoder.decode(torch.from_numpy(codes).long()[None], [decoder.initial_state()])
    samples: Audio = audio.reshape(-1).float().numpy()
    return samples


def loudness_step(before: Audio, after: Audio) -> float:
    """Return the loudness difference in dB between the last sound of `before` and the first sound of `after`."""
    return abs(_level_db(_last(before, _LOUD_S)) - _level_db(_first(after, _LOUD_S)))


def pitch_step(before: Audio, after: Audio) -> float:
    """Return the difference between the median pitches in semitones, or nan if a side has no voiced frames."""
    return float(abs(12 * np.log2(pitch_hz(_last(before, _PITCH_S)) / pitch_hz(_first(after, _PITCH_S)))))


def spectrum_step(before: Audio, after: Audio) -> float:
    """Return the log-spectral distance in dB between the sides' mean spectra, in equal bands at equal loudness."""
    one, other = _spectrum_db(_last(before, _PITCH_S)), _spectrum_db(_first(after, _PITCH_S))
    return float(np.sqrt(np.mean(np.square((one - one.mean()) - (other - other.mean())))))


def quiet_ms(before: Audio, after: Audio) -> float:
    """Return the milliseconds of silence between both sides."""
    return 1000 * (len(before) - sounding(before)[1] + sounding(after)[0]) / _RATE


def pitch_hz(audio: Audio) -> float:
    """Return the median pitch of voiced frames in Hz, by autocorrelation."""
    found = [hz for frame in _frames(audio, 960, 480) if (hz := _frame_hz(frame)) is not None]
    return float(np.median(found)) if found else float("nan")


def _frame_hz(frame: Audio) -> float | None:
    centred = frame - frame.mean()
    power = float(centred @ centred)
    lags = np.arange(_RATE // 400, _RATE // 70)
    if power < len(frame) * 1e-5:
        return None
    similar = np.array([centred[:-lag] @ centred[lag:] / power * len(frame) / (len(frame) - lag) for lag in lags])
    best = int(similar.argmax())
    return _RATE / int(lags[best]) if similar[best] > 0.5 else None


def _spectrum_db(audio: Audio) -> NDArray[np.float64]:
    power = np.mean([np.square(np.abs(np.fft.rfft(each * np.hanning(1024)))) for each in _frames(audio, 1024, 512)], 0)
    bands = np.array([band.mean() for band in np.array_split(power[1:], _BANDS)])
    return 10 * np.log10(bands + 1e-9)


def _frames(audio: Audio, size: int, step: int) -> Iterator[Audio]:
    return (audio[start : start + size] for start in range(0, len(audio) - size + 1, step))


def _level_db(audio: Audio) -> float:
    return max(_FLOOR_DB, 10 * float(np.log10(np.mean(np.square(audio)) + 1e-12)))


def _last(audio: Audio, seconds: float) -> Audio:
    end = sounding(audio)[1]
    return audio[max(0, end - int(seconds * _RATE)) : end]


def _first(audio: Audio, seconds: float) -> Audio:
    start = sounding(audio)[0]
    return audio[start : start + int(seconds * _RATE)]


if __name__ == "__main__":
    main()
