"""Messages that cross a deployment handle: requests to the replicas, and frames and audio in return.

All messages are frozen values of small plain objects, which pickle fast. Codes are int16, so a frame of 16 codes takes
32 bytes.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int16]  # [frames, num_code_groups]
Frame = NDArray[np.int16]  # [num_code_groups]: codes for one frame
Pcm = NDArray[np.int16]  # [samples]

SAMPLE_BYTES = 2  # s16le, as in the `pcm` of chunks
ALL_FRAMES = 1 << 30  # more than any stream has


class ModelKind(StrEnum):
    """Where a checkpoint's voice comes from: a named speaker, a verbal description, or a reference recording."""

    CUSTOM_VOICE = "custom_voice"
    VOICE_DESIGN = "voice_design"
    BASE = "base"


class FinishReason(StrEnum):
    """Why a stream ended."""

    STOP = "stop"  # the talker sampled its end-of-speech code
    EARLY = "early"  # the talker ended before any sound, before the end of the text, or much too early for its length
    LENGTH = "length"  # max_new_tokens
    SILENCE = "silence"  # the talker produced seconds of silence or room noise instead of ending
    LOOP = "loop"  # the talker repeated itself instead of ending
    RUNAWAY = "runaway"  # the talker went on after the last word, or made far more frames than the text could need

    @property
    def is_good(self) -> bool:
        """Whether the stream contains the complete text, or as much as `max_new_tokens` allows, and nothing else."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


# A stage that a request or its first audio has reached, with its time.time_ns(), because marks from different hosts
# are compared. A plain pair pickles 20 times as fast as an object.
Mark = tuple[str, int]
Marks = tuple[Mark, ...]


INT32_MAX = 2**31 - 1
# Multiplying or dividing logits by a larger factor would exceed the float32 range.
_SCALE = {"gt": 0, "ge": 1e-6, "le": 1e6}
_PROBABILITY = {"gt": 0, "le": 1}
_COUNT = {"ge": 0, "le": INT32_MAX}


def _option(official: float, **bounds: float) -> Any:
    """Return a field whose default, `official`, matches the official package. `bounds` limit values in requests."""
    return field(default=None, metadata={"official": official, "bounds": bounds, "is_drawing": False})


def _drawing_option(official: float, **bounds: float) -> Any:
    """Return a field for an option that has no effect if `do_sample` is False.

    The code predictor has an option with the same name, prefixed with SUBTALKER.
    """
    return field(default=None, metadata={"official": official, "bounds": bounds, "is_drawing": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling options, named as in the official package. None selects the value in `generation_config.json`.

    The fields of request bodies are generated from this class. `DrawingOptions`
    (deployments/talker/state/batch_state.py) repeats the DRAWING_OPTIONS with the types that they have in a batch.
    Names of code predictor options begin with SUBTALKER.
    """

    do_sample: bool | None = _option(True)
    temperature: float | None = _drawing_option(0.9, **_SCALE)
    top_k: int | None = _drawing_option(50, **_COUNT)
    top_p: float | None = _drawing_option(1.0, **_PROBABILITY)
    repetition_penalty: float | None = _option(1.05, **_SCALE)
    subtalker_dosample: bool | None = _option(True)
    subtalker_temperature: float | None = _option(0.9, **_SCALE)
    subtalker_top_k: int | None = _option(50, **_COUNT)
    subtalker_top_p: float | None = _option(1.0, **_PROBABILITY)
    max_new_tokens: int | None = _option(2048, ge=1, le=INT32_MAX)


SUBTALKER = "subtalker_"
SAMPLING_DEFAULTS = {option.name: option.metadata["official"] for option in fields(Sampling)}
# The talker's drawing options
DRAWING_OPTIONS = tuple(option.name for option in fields(Sampling) if option.metadata["is_drawing"])
for _name in DRAWING_OPTIONS:
    assert SUBTALKER + _name in SAMPLING_DEFAULTS, f"Sampling has {_name}: add {SUBTALKER}{_name}, an _option"


@dataclass(frozen=True, slots=True)
class ClonePrompt:
    """Speaker vector and codes of a recording, usable by any replica. A hundredth of the recording's size."""

    speaker: NDArray[np.float32]  # [hidden]
    codes: Codes | None = None  # [frames, num_code_groups]; None if only the speaker vector was requested

    @property
    def nbytes(self) -> int:
        return self.speaker.nbytes + (0 if self.codes is None else self.codes.nbytes)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the arrays as bytes, because Ray sends an out-of-band array more slowly than a copy."""
        codes = None if self.codes is None else (self.codes.tobytes(), self.codes.shape)
        return _clone_prompt, (self.speaker.astype(np.float32, copy=False).tobytes(), codes)


def _clone_prompt(speaker: bytes, codes: tuple[bytes, tuple[int, ...]] | None) -> ClonePrompt:
    frames = None if codes is None else np.frombuffer(codes[0], np.int16).reshape(codes[1])
    return ClonePrompt(np.frombuffer(speaker, np.float32), frames)


@dataclass(frozen=True, slots=True)
class Reference:
    """A recording to clone: either its samples, or the prompt that a replica has made from them."""

    audio: NDArray[np.float32] | None  # [samples] of mono audio at the model's sample rate; None if there is a `prompt`
    text: str | None = None
    x_vector_only: bool = False
    prompt: ClonePrompt | None = None  # with codes, unless `x_vector_only`
    key: bytes = b""  # recordings with equal keys have equal samples; by default a hash of the samples

    def __post_init__(self) -> None:
        """Hash the samples once, at the ingress."""
        if not self.key and self.audio is not None:
            object.__setattr__(self, "key", hashlib.sha256(np.ascontiguousarray(self.audio).data).digest())

    @property
    def samples(self) -> NDArray[np.float32]:
        assert self.audio is not None, "either samples or a prompt"
        return self.audio

    def with_prompt(self, prompt: ClonePrompt | None) -> "Reference":
        """Return this reference with `prompt` instead of its samples, or unchanged if `prompt` lacks required codes."""
        if self.prompt is not None or prompt is None or (prompt.codes is None and not self.x_vector_only):
            return self
        return replace(self, audio=None, prompt=prompt)


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of earlier speech in the same voice. The request's speech continues from it and does not include it."""

    text: str  # ends with a space, unless its script does not use spaces
    codes: Codes  # [frames, num_code_groups] that speak the text

    @property
    def gap(self) -> str:
        """Separator between this text and the text that follows."""
        return " " if self.text.endswith(" ") else ""


@dataclass(frozen=True, slots=True)
class Progress:
    """The part of an utterance that its reader has received. Another replica continues from here."""

    codes: Codes  # all frames from the beginning
    samples: int  # delivered, counted before the codec's leading silence is trimmed
    in_hand_s: float = 0.0  # seconds of delivered audio that the player has not played yet, according to `Listener`


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Address from which a talker reads a text while the client is writing it. See `deployments.serving.mailbox`."""

    host: str
    port: int
    token: str  # secret for this text


@dataclass(frozen=True, slots=True)
class SynthesisRequest:
    """One segment of an utterance. The ingress sends the request to a codec replica, which forwards it to a talker.

    With `inline` placement the ingress sends the request directly to a talker.
    """

    request_id: str
    text: str
    client: str = ""  # the client's name, for fair queuing among clients
    model: str = ""  # `ModelInfo.route`
    marks: Marks = ()  # empty for job segments

    # Voice and style
    voice: str | None = None  # speaker of a custom_voice checkpoint, lower case
    language: str = "auto"  # lower case
    instructions: str | None = None
    reference: Reference | None = None  # base checkpoints
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0  # 0 <= seed < 2**64
    non_streaming_mode: bool | None = None  # None: the official package's default for this kind of checkpoint
    ignore_eos: bool = False  # only max_new_tokens ends the speech
    leading_silence: bool = False  # True keeps silent leading frames
    word_times: bool = False  # include readings in chunks
    # A job segment. Jobs use the capacity left over by streams with listeners, and do not count toward any limit.
    background: bool = False

    # A text in several segments, or a text that is still being written: set by `Segments` and `LiveText` of the ingress
    continues: bool = False  # a later segment of a long text: replicas never reject it, and they serve it first
    following: tuple[str, ...] = ()  # texts of later segments; replicas reject the request if any is too long
    mailbox: Mailbox | None = None  # address of the text while the client writes it; `text` is empty then
    tail: Tail | None = None  # of the previous segment, or of an earlier request

    # A stream that continues on another replica: set by `ReceivedProgress` of deployments/serving/failover.py
    resume: Progress | None = None  # the part that another replica has produced
    is_retry: bool = False  # another replica had this request before and may hang

    # For a talker: set by `TalkerAudio` of the ingress, or by a codec replica
    gpu_frames: int = 0  # how many frames beyond those delivered the talker decodes; ALL_FRAMES: every frame
    reference_codes: Codes | None = None  # [frames, num_code_groups] of the reference, None without in-context cloning

    @property
    def gap(self) -> str:
        """Separator that the talker reads before the text."""
        return "" if self.tail is None else self.tail.gap

    @property
    def in_hand_s(self) -> float:
        """Seconds of audio from another replica that the listener has not played yet."""
        return 0.0 if self.resume is None else self.resume.in_hand_s

    @property
    def is_continuation(self) -> bool:
        """Whether the client already has part of this speech, so that rejecting the request would cut it off."""
        return self.continues or self.resume is not None

    @property
    def prefix(self) -> Codes | None:
        """Frames that already exist, [frames, num_code_groups]. Generation continues after them."""
        return None if self.resume is None else self.resume.codes

    @property
    def before(self) -> Codes | None:
        """Frames that precede the speech and are not delivered: the reference's frames, then the tail's frames."""
        if self.tail is None or self.reference_codes is None:
            return self.reference_codes if self.tail is None else self.tail.codes.copy()  # torch needs writable arrays
        return np.concatenate([self.reference_codes, self.tail.codes])


@dataclass(frozen=True, slots=True)
class Reading:
    """Text positions of several consecutive frames, estimated from the talker's attention."""

    first: int  # number of the first frame
    chars: tuple[float, ...]  # number of characters of the text before each frame


@dataclass(frozen=True, slots=True)
class FrameChunk:
    """Consecutive frames of one stream. The last chunk of a stream has a `finish_reason` and may hold no frames.

    `pcm` is audio of the first `gpu_frames` frames, in order. Audio may arrive in a later chunk than its codes, but no
    later than the last chunk. A chunk that has no frames, audio or finish reason is a heartbeat.
    """

    codes: Codes
    num_text_tokens: int
    finish_reason: FinishReason | None = None
    pcm: bytes = b""  # s16le, complete frames
    marks: Marks = ()  # on the first audio, if the request has marks: all stages up to the engine and back
    readings: tuple[Reading, ...] = ()  # empty unless `word_times` is requested and the model has an alignment head
    clone_prompt: ClonePrompt | None = None  # on the first chunk, if the request had samples; replaces the samples
    # The replica that produces the stream from this chunk on, with its start time: ("Talker#1a2b3c4d", ns). A preceding
    # entry names the loss that caused the switch of replicas.
    trail: Marks = ()

    @classmethod
    def join(cls, chunks: Sequence["FrameChunk"]) -> "FrameChunk":
        """Combine consecutive chunks of one stream into a single chunk. Only the last one may have a finish reason."""
        if len(chunks) == 1:
            return chunks[0]
        return cls(
            codes=np.concatenate([chunk.codes for chunk in chunks]),
            num_text_tokens=max(chunk.num_text_tokens for chunk in chunks),
            finish_reason=chunks[-1].finish_reason,
            pcm=b"".join(chunk.pcm for chunk in chunks),
            marks=next((chunk.marks for chunk in chunks if chunk.marks), ()),
            readings=tuple(reading for chunk in chunks for reading in chunk.readings),
            clone_prompt=next((chunk.clone_prompt for chunk in chunks if chunk.clone_prompt), None),
            trail=tuple(mark for chunk in chunks for mark in chunk.trail),
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the codes as bytes, which takes a third of the time of a data class with an array."""
        return _frame_chunk, (*_packed(self.codes), *_beside_frames(self))


def _packed(codes: Codes) -> tuple[bytes, tuple[int, ...]]:
    return codes.astype(np.int16, copy=False).tobytes(), codes.shape


def _frame_chunk(codes: bytes, shape: tuple[int, ...], *beside: Any) -> FrameChunk:
    return FrameChunk(np.frombuffer(codes, np.int16).reshape(shape), *beside)


@dataclass(frozen=True, slots=True)
class PcmChunk:
    """Audio of one stream, and the codes from which the audio was decoded.

    Leading silence is removed from the audio, but not from the codes. A heartbeat only shows that its sender is alive.
    """

    pcm: bytes  # s16le, mono, at ModelInfo.sample_rate
    codes: Codes  # frames that the receiver does not yet have
    num_text_tokens: int
    finish_reason: FinishReason | None = None
    position: int = 0  # samples delivered up to and including this chunk, as in `Progress`
    marks: Marks = ()  # see FrameChunk
    readings: tuple[Reading, ...] = ()  # see FrameChunk; readings may arrive before the audio of their frames
    clone_prompt: ClonePrompt | None = None  # see FrameChunk
    trail: Marks = ()  # see FrameChunk; contains talkers and codec replicas

    # The chunk's place in an utterance of several segments: set by the ingress
    text_positions: tuple[tuple[float, float], ...] = ()  # (seconds of the utterance's audio, characters spoken)
    seed: int | None = None  # set if it differs from the request's seed
    segment: int = 0  # segment number; the codec's state starts afresh in each segment

    def __reduce__(self) -> tuple[object, ...]:
        return _pcm_chunk, (*_packed(self.codes), *_beside_samples(self))

    @property
    def num_samples(self) -> int:
        return len(self.pcm) // SAMPLE_BYTES

    @property
    def is_heartbeat(self) -> bool:
        return not len(self.codes) and not self.pcm and self.finish_reason is None

    def emptied(self) -> "PcmChunk":
        """Return a chunk of the same utterance that has no audio, frames or finish reason."""
        return PcmChunk(
            b"", self.codes[:0], self.num_text_tokens, position=self.position, seed=self.seed, segment=self.segment
        )


# Values of all fields except `codes`, in order. `_frame_chunk` and `_pcm_chunk` pass them on by position.
_beside_frames, _beside_samples = (
    attrgetter(*(each.name for each in fields(kind) if each.name != "codes")) for kind in (FrameChunk, PcmChunk)
)


def _pcm_chunk(codes: bytes, shape: tuple[int, ...], pcm: bytes, *beside: Any) -> PcmChunk:
    return PcmChunk(pcm, np.frombuffer(codes, np.int16).reshape(shape), *beside)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a loaded checkpoint, for use by the ingress."""

    name: str  # value of `model` in requests: the settings' name if there are several models, else the checkpoint's
    kind: ModelKind
    voices: tuple[str, ...]  # lower case; empty unless custom_voice
    languages: tuple[str, ...]  # lower case, without "auto"
    supports_instructions: bool
    sample_rate: int
    frame_samples: int
    num_code_groups: int
    talker_on_gpu: bool = False
    deterministic: bool = False  # whether text and seed determine the codes, independently of concurrent requests
    codec_precision: str = "float32"  # number format in which the talker's device decodes
    spoken_form: str | None = None  # the language, for a voice that can read only words and needs numbers spelled out
    max_segment_chars: int = 1000  # longer texts are synthesized in segments
    word_times: bool = False  # whether the alignment head is known; if so, readings are exact, otherwise estimated
    clones_by_vector: bool = False  # uses only the speaker vector of a recording, no codes: `x_vector_only_mode`
    checkpoint: str = ""  # the checkpoint's path or repository if there are several models; empty for a single model
    fingerprint: str = ""  # hash of the weights that clone prompts depend on; empty unless `kind` is base

    @property
    def route(self) -> str:
        """Value of `SynthesisRequest.model` for this model: its name in the settings, or "" for a single model."""
        return self.name if self.checkpoint else ""

    @property
    def frame_s(self) -> float:
        return self.frame_samples / self.sample_rate


Marked = TypeVar("Marked", bound=SynthesisRequest | FrameChunk | PcmChunk)


def with_mark(item: Marked, stage: str) -> Marked:
    """Return `item` with a mark that it has reached `stage` now. An item without marks is returned unchanged."""
    return replace(item, marks=(*item.marks, (stage, time.time_ns()))) if item.marks else item
