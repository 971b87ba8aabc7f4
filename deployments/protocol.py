"""Messages that cross a deployment handle: requests downwards, frames and audio upwards.

All are frozen values of small plain objects, which pickle fast. Codes are int16, so a frame of 16 codes has 32 bytes.
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
Frame = NDArray[np.int16]  # [num_code_groups]: the codes of one frame
Pcm = NDArray[np.int16]  # [samples]

SAMPLE_BYTES = 2  # of s16le, in `pcm` of chunks
ALL_FRAMES = 1 << 30  # more than any stream has


class ModelKind(StrEnum):
    """The voice that a checkpoint takes: a named speaker, a description in words, or a reference recording."""

    CUSTOM_VOICE = "custom_voice"
    VOICE_DESIGN = "voice_design"
    BASE = "base"


class FinishReason(StrEnum):
    """Why a stream ended."""

    STOP = "stop"  # the talker sampled its end-of-speech code
    EARLY = "early"  # the talker sampled it before any sound, with words unsaid, or far too early for the text
    LENGTH = "length"  # max_new_tokens
    SILENCE = "silence"  # the talker missed the end: seconds of silence or room noise
    LOOP = "loop"  # the talker missed the end: it repeats itself
    RUNAWAY = "runaway"  # it continues with no words left, or has far more frames than its text can need

    @property
    def is_good(self) -> bool:
        """Whether all of the text was spoken, or as much as was asked for, and nothing else."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


# A stage that a request, or its first audio, has reached, and when by time.time_ns(), because marks of several hosts
# are compared. A plain pair pickles in a twentieth of the time of an object.
Mark = tuple[str, int]
Marks = tuple[Mark, ...]


INT32_MAX = 2**31 - 1
# Dividing or multiplying logits by more would leave the range of float32.
_SCALE = {"gt": 0, "ge": 1e-6, "le": 1e6}
_PROBABILITY = {"gt": 0, "le": 1}
_COUNT = {"ge": 0, "le": INT32_MAX}


def _option(official: float, **bounds: float) -> Any:
    """`official`: the official package's default, for checkpoints that name none. `bounds`: of a request's value."""
    return field(default=None, metadata={"official": official, "bounds": bounds, "is_drawing": False})


def _drawing_option(official: float, **bounds: float) -> Any:
    """An option of how a code is drawn, without effect where `do_sample` is False. The code predictor has one of the
    same name, after SUBTALKER.
    """
    return field(default=None, metadata={"official": official, "bounds": bounds, "is_drawing": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling options under the official package's names. None takes the checkpoint's `generation_config.json`.

    Fields of request bodies are made from this list. `DrawingOptions` (deployments/talker/state/batch_state.py) lists
    the DRAWING_OPTIONS again with their types in a batch. Options of the code predictor begin with SUBTALKER.
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
# Of the talker.
DRAWING_OPTIONS = tuple(option.name for option in fields(Sampling) if option.metadata["is_drawing"])
for _name in DRAWING_OPTIONS:
    assert SUBTALKER + _name in SAMPLING_DEFAULTS, f"Sampling has {_name}: add {SUBTALKER}{_name}, an _option"


@dataclass(frozen=True, slots=True)
class ClonePrompt:
    """The part of a recording that a checkpoint needs, a hundredth of its bytes. Any replica can use it."""

    speaker: NDArray[np.float32]  # [hidden]
    codes: Codes | None = None  # [frames, num_code_groups]; None where only the speaker vector was asked for

    @property
    def nbytes(self) -> int:
        return self.speaker.nbytes + (0 if self.codes is None else self.codes.nbytes)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles bytes: on the way to a replica, an array next to the pickle takes longer than copying it."""
        codes = None if self.codes is None else (self.codes.tobytes(), self.codes.shape)
        return _clone_prompt, (self.speaker.astype(np.float32, copy=False).tobytes(), codes)


def _clone_prompt(speaker: bytes, codes: tuple[bytes, tuple[int, ...]] | None) -> ClonePrompt:
    frames = None if codes is None else np.frombuffer(codes[0], np.int16).reshape(codes[1])
    return ClonePrompt(np.frombuffer(speaker, np.float32), frames)


@dataclass(frozen=True, slots=True)
class Reference:
    """A recording to clone: its samples, or the prompt that a replica has made of them."""

    audio: NDArray[np.float32] | None  # [samples] of mono audio at the model's sample rate; None if there is a `prompt`
    text: str | None = None
    x_vector_only: bool = False
    prompt: ClonePrompt | None = None  # with codes, unless `x_vector_only`
    key: bytes = b""  # recordings of one key have the same samples; by default made from these

    def __post_init__(self) -> None:
        """Hash the samples once, where the recording comes in."""
        if not self.key and self.audio is not None:
            object.__setattr__(self, "key", hashlib.sha256(np.ascontiguousarray(self.audio).data).digest())

    @property
    def samples(self) -> NDArray[np.float32]:
        assert self.audio is not None, "either samples or a prompt"
        return self.audio

    def by_prompt(self, prompt: ClonePrompt | None) -> "Reference":
        """This reference with `prompt` in place of its samples, if `prompt` has what is needed; else itself."""
        if self.prompt is not None or prompt is None or (prompt.codes is None and not self.x_vector_only):
            return self
        return replace(self, audio=None, prompt=prompt)


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of earlier speech of the same voice. The request's speech continues from it, and does not contain it."""

    text: str  # with a space at its end, unless its script has none
    codes: Codes  # [frames, num_code_groups] that speak the text

    @property
    def gap(self) -> str:
        """Separator of the text and the text that follows."""
        return " " if self.text.endswith(" ") else ""


@dataclass(frozen=True, slots=True)
class Progress:
    """The part of an utterance that its reader has. Another replica continues from it."""

    codes: Codes  # all frames from the beginning
    samples: int  # delivered, counted before the codec's quiet start is trimmed
    in_hand_s: float = 0.0  # seconds of delivered audio that are not played yet, by `Listener`


@dataclass(frozen=True, slots=True)
class Mailbox:
    """The address at which a talker reads a text while the client writes it: see `deployments.serving.mailbox`."""

    host: str
    port: int
    token: str  # secret of this text


@dataclass(frozen=True, slots=True)
class SynthesisRequest:
    """One segment of an utterance. The ingress sends it to a codec replica, which sends it on to a talker, or with
    `inline` placement to a talker.
    """

    request_id: str
    text: str
    client: str = ""  # the client's name, for queues that are fair to clients
    model: str = ""  # `ModelInfo.route`
    marks: Marks = ()  # empty for a segment of a job

    # Who speaks, and how.
    voice: str | None = None  # speaker of a custom_voice checkpoint, lower case
    language: str = "auto"  # lower case
    instructions: str | None = None
    reference: Reference | None = None  # base checkpoints
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0  # 0 <= seed < 2**64
    non_streaming_mode: bool | None = None  # None: as the official package does for this kind of checkpoint
    ignore_eos: bool = False  # nothing but max_new_tokens ends speech
    leading_silence: bool = False  # True keeps quiet leading frames
    word_times: bool = False  # chunks bring readings
    # A segment of a job, for which no listener waits: it uses the capacity that listeners leave, and counts toward no
    # limit.
    background: bool = False

    # A text in several segments, or still being written: set by `Segments` and `LiveText` of the ingress.
    continues: bool = False  # a later segment of a long text: it is not refused and goes first
    following: tuple[str, ...] = ()  # texts of the later segments: the request is refused where one is too long
    mailbox: Mailbox | None = None  # where the text is while the client writes it; `text` is empty then
    tail: Tail | None = None  # of the segment before, or of an earlier request

    # A stream that continues elsewhere: set by `Received` of deployments/serving/failover.py.
    resume: Progress | None = None  # the part that another replica has made
    is_retry: bool = False  # of another replica, which may hang

    # For a talker: set by `TalkerAudio` of the ingress, or by a codec replica.
    gpu_frames: int = 0  # how many frames after the delivered ones the talker decodes; ALL_FRAMES: all
    reference_codes: Codes | None = None  # [frames, num_code_groups] of the reference, None without in-context cloning

    @property
    def gap(self) -> str:
        """Prefix that the talker reads before the text."""
        return "" if self.tail is None else self.tail.gap

    @property
    def in_hand_s(self) -> float:
        """Seconds of audio of another replica that the listener has not played yet."""
        return 0.0 if self.resume is None else self.resume.in_hand_s

    @property
    def is_continuation(self) -> bool:
        """Whether the client has a part of this speech already. A refusal would end it in the middle."""
        return self.continues or self.resume is not None

    @property
    def prefix(self) -> Codes | None:
        """Frames that exist already. Generation continues after them."""
        return None if self.resume is None else self.resume.codes

    @property
    def before(self) -> Codes | None:
        """Frames that speech continues from, and which are not delivered: the reference's, then the tail's."""
        if self.tail is None or self.reference_codes is None:
            return self.reference_codes if self.tail is None else self.tail.codes.copy()  # torch wants to write to it
        return np.concatenate([self.reference_codes, self.tail.codes])


@dataclass(frozen=True, slots=True)
class Reading:
    """The place in the text of each of some consecutive frames, by the talker's attention."""

    first: int  # number of the first frame
    chars: tuple[float, ...]  # for each frame, how many characters of the text are before it


@dataclass(frozen=True, slots=True)
class FrameChunk:
    """Consecutive frames of one stream. The last chunk of a stream has a `finish_reason` and may hold no frames.

    `pcm` is audio of the first `gpu_frames` frames, in order. It may come later than the codes it is made of, at the
    latest in the last chunk. Another chunk without frames and audio is a heartbeat.
    """

    codes: Codes
    num_text_tokens: int
    finish_reason: FinishReason | None = None
    pcm: bytes = b""  # s16le, whole frames
    marks: Marks = ()  # on the first audio of a request with marks: all stages to the engine and back
    readings: tuple[Reading, ...] = ()  # empty unless the request has `word_times` and the model an alignment head
    clone_prompt: ClonePrompt | None = None  # on the first chunk, where the request had samples: send it from then on
    # The replica that makes the stream from this chunk on, since when, and after which loss: ("Talker#1a2b3c4d", ns).
    trail: Marks = ()

    @classmethod
    def join(cls, chunks: Sequence["FrameChunk"]) -> "FrameChunk":
        """Consecutive chunks of one stream as one, of which only the last may have a finish reason."""
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
        """Pickles bytes, in a third of the time of a data class with an array."""
        return _frame_chunk, (*_packed(self.codes), *_beside_frames(self))


def _packed(codes: Codes) -> tuple[bytes, tuple[int, ...]]:
    return codes.astype(np.int16, copy=False).tobytes(), codes.shape


def _frame_chunk(codes: bytes, shape: tuple[int, ...], *beside: Any) -> FrameChunk:
    return FrameChunk(np.frombuffer(codes, np.int16).reshape(shape), *beside)


@dataclass(frozen=True, slots=True)
class PcmChunk:
    """Audio of one stream, and the codes it was decoded from. Quiet audio at the start is left out, its codes are not.

    A heartbeat only shows that its sender is alive.
    """

    pcm: bytes  # s16le, mono, at ModelInfo.sample_rate
    codes: Codes  # frames that are new to the receiver
    num_text_tokens: int
    finish_reason: FinishReason | None = None
    position: int = 0  # samples delivered with this chunk, as in `Progress`
    marks: Marks = ()  # see FrameChunk
    readings: tuple[Reading, ...] = ()  # see FrameChunk; they may come before the audio of their frames
    clone_prompt: ClonePrompt | None = None  # see FrameChunk
    trail: Marks = ()  # see FrameChunk; of talkers and codecs

    # The chunk's place in an utterance of several segments: set by the ingress.
    text_positions: tuple[tuple[float, float], ...] = ()  # (seconds of the utterance's audio, characters spoken)
    seed: int | None = None  # if it differs from the request's
    segment: int = 0  # the codec begins anew with each

    def __reduce__(self) -> tuple[object, ...]:
        return _pcm_chunk, (*_packed(self.codes), *_beside_samples(self))

    @property
    def num_samples(self) -> int:
        return len(self.pcm) // SAMPLE_BYTES

    @property
    def is_heartbeat(self) -> bool:
        return not len(self.codes) and not self.pcm and self.finish_reason is None

    def emptied(self) -> "PcmChunk":
        """A chunk of the same utterance without content: no audio, no frames, no end."""
        return PcmChunk(
            b"", self.codes[:0], self.num_text_tokens, position=self.position, seed=self.seed, segment=self.segment
        )


_beside_frames, _beside_samples = (
    attrgetter(*(each.name for each in fields(kind) if each.name != "codes")) for kind in (FrameChunk, PcmChunk)
)


def _pcm_chunk(codes: bytes, shape: tuple[int, ...], pcm: bytes, *beside: Any) -> PcmChunk:
    return PcmChunk(pcm, np.frombuffer(codes, np.int16).reshape(shape), *beside)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a loaded checkpoint for the ingress."""

    name: str  # clients send it as `model`: the name in the settings if there are several models, else the checkpoint's
    kind: ModelKind
    voices: tuple[str, ...]  # lower case; empty unless custom_voice
    languages: tuple[str, ...]  # lower case, without "auto"
    supports_instructions: bool
    sample_rate: int
    frame_samples: int
    num_code_groups: int
    talker_on_gpu: bool = False
    deterministic: bool = False  # whether text and seed decide the codes, whatever else the talker does meanwhile
    codec_precision: str = "float32"  # in which the talker's device decodes
    spoken_form: str | None = None  # a language, where the voice has learnt only words and needs figures as words
    max_segment_chars: int = 1000  # longer texts are synthesised in segments
    word_times: bool = False  # whether its alignment head is known: readings are exact, else estimates
    clones_by_vector: bool = False  # of a recording it takes the speaker vector alone, no codes: `x_vector_only_mode`
    checkpoint: str = ""  # its path or repository if there are several models; empty for a single one
    fingerprint: str = ""  # hash of the weights that make clone prompts, which fit no others. Empty unless base.

    @property
    def route(self) -> str:
        """`SynthesisRequest.model` of requests for this model: its name in the settings, empty of a single one."""
        return self.name if self.checkpoint else ""

    @property
    def frame_s(self) -> float:
        return self.frame_samples / self.sample_rate


Marked = TypeVar("Marked", bound=SynthesisRequest | FrameChunk | PcmChunk)


def with_mark(item: Marked, stage: str) -> Marked:
    """`item` with a mark that it has reached `stage` now. An item without marks is unchanged."""
    return replace(item, marks=(*item.marks, (stage, time.time_ns()))) if item.marks else item
