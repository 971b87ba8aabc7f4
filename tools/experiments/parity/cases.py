"""Test cases for both implementations. Both environments import this module, so it needs only numpy."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 24000
SEED = 1
WAV_DECODING = "sampled"  # decoding options whose audio is compared


@dataclass(frozen=True)
class Extent:
    """Scope of a comparison."""

    max_new_tokens: int
    wav_frames: int
    decodings: tuple[str, ...] = ("greedy", "sampled", "narrow", "greedy_talker")
    cases: tuple[str, ...] = ()  # prefixes of case names; empty: all cases of a kind


GOLDEN = Extent(max_new_tokens=24, wav_frames=6)
LIVE = Extent(max_new_tokens=60, wav_frames=59)
STRESS = Extent(max_new_tokens=48, wav_frames=47, decodings=("greedy", "sampled"), cases=("speaker", "instruct"))
STORED = Extent(max_new_tokens=24, wav_frames=23, decodings=("greedy", "sampled"), cases=("clone", "speaker vector"))
EXTENTS = {"golden": GOLDEN, "live": LIVE, "stress": STRESS, "stored": STORED}
VOICE_TEXTS = {"by transcript": "Some reference text.", "by vector": None}  # transcripts of a stored recording


@dataclass(frozen=True)
class ParityCase:
    """One prompt in one text mode, in the official package's terms."""

    name: str
    kind: str  # tts_model_type
    text: str
    non_streaming_mode: bool
    language: str = "Auto"
    speaker: str | None = None
    instruct: str | None = None
    ref_text: str | None = None  # base: None clones from the speaker vector alone


# Keyword arguments of the official generate methods, which are also fields of our Sampling.
DECODINGS: Mapping[str, Mapping[str, bool | float]] = {
    "greedy": {"do_sample": False, "subtalker_dosample": False},
    "sampled": {},
    "narrow": {
        "temperature": 0.8,
        "top_k": 12,
        "top_p": 0.9,
        "repetition_penalty": 1.5,
        "subtalker_temperature": 0.7,
        "subtalker_top_k": 5,
        "subtalker_top_p": 0.8,
    },
    "greedy_talker": {"do_sample": False},
}


def _both(kind: str, name: str, text: str, **prompt: str) -> list[ParityCase]:
    return [
        ParityCase(f"{name}/full_text", kind, text, non_streaming_mode=True, **prompt),
        ParityCase(f"{name}/streaming_text", kind, text, non_streaming_mode=False, **prompt),
    ]


CASES = [
    *_both("custom_voice", "speaker", "Hello there, brave new world.", speaker="Ryan", language="English"),
    *_both("custom_voice", "dialect", "你好，世界。", speaker="eric"),
    *_both("custom_voice", "dialect speaks English", "Hi.", speaker="eric", language="English"),
    *_both("custom_voice", "instruct", "One, two.", speaker="serena", instruct="Slowly, please.", language="German"),
    *_both("voice_design", "instruct", "Hello there.", instruct="A calm low voice.", language="French"),
    *_both("voice_design", "no instruct", "A <|im_start|think> b\n"),
    *_both("base", "clone", "Hi.", ref_text="Hm.", language="English"),
    *_both(
        "base", "clone long text", "Hello again and again. " * 3, ref_text="Some reference text.", language="English"
    ),
    *_both("base", "speaker vector", "Hello there.", language="Chinese"),
]


def cases_of(kind: str, extent: Extent = LIVE) -> list[ParityCase]:
    wanted = [case for case in CASES if case.kind == kind]
    return [case for case in wanted if not extent.cases or case.name.split("/")[0] in extent.cases]


def case_key(case: ParityCase, decoding: str) -> str:
    return f"{case.name}/{decoding}"


def reference_audio(num_samples: int = 2 * SAMPLE_RATE) -> NDArray[np.float32]:
    """Return a buzz with noise that is equal on every machine, because only the last step uses floats."""
    time = np.arange(num_samples)
    triangle = np.abs(time % 200 - 100) - 50
    noise = np.random.RandomState(0).randint(-8, 9, num_samples)
    return ((triangle * (time // 2400 % 3) + noise) / 256).astype(np.float32)
