"""Messages that cross a deployment handle: requests downwards, frames and audio upwards.

Everything here is a frozen value of small plain objects, cheap to pickle. Codes are int16: 16 codes are 32 bytes.
"""

import hashlib
import time
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int16]  # [frames, num_code_groups]

ALL_FRAMES = 1 << 30  # more than any stream has


class ModelKind(StrEnum):
    """The voice that a checkpoint takes: a named speaker, a description in words, or a reference recording."""

    CUSTOM_VOICE = "custom_voice"
    VOICE_DESIGN = "voice_design"
    BASE = "base"


class FinishReason(StrEnum):
    """Why a stream ended."""

    STOP = "stop"  # the talker sampled its end-of-speech code
    EARLY = "early"  # the talker did so although the text needs far more frames, or before any sound
    LENGTH = "length"  # max_new_tokens
    SILENCE = "silence"  # the end was missed: silence, or the noise of a room, for seconds
    LOOP = "loop"  # the end was missed: the same again and again
    RUNAWAY = "runaway"  # far more frames than the text can need


@dataclass(frozen=True, slots=True)
class Mark:
    """A stage that a request, or the audio it asked for, has come to."""

    stage: str
    at_ns: int  # time.time_ns(): hosts have it in common as well as their clocks agree


Marks = tuple[Mark, ...]


INT32_MAX = 2**31 - 1
# Dividing or multiplying logits by more would leave the range of float32.
_SCALE = {"gt": 0, "ge": 1e-6, "le": 1e6}
_PROBABILITY = {"gt": 0, "le": 1}
_COUNT = {"ge": 0, "le": INT32_MAX}


def _option(official: float, **bounds: float) -> Any:
    """`official`: the official package's default, for checkpoints that name none. `bounds`: of a request's value."""
    return field(default=None, metadata={"official": official, "bounds": bounds, "is_filter": False})


def _filter(official: float, **bounds: float) -> Any:
    """An option that decides which code is drawn. The code predictor has one of the same name."""
    return field(default=None, metadata={"official": official, "bounds": bounds, "is_filter": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling options under the official package's names. None takes the checkpoint's `generation_config.json`.

    The one list of options: fields of request bodies follow from it. `FilterOptions` of talker/sampling.py names the
    filters again, with their types in the batch, and columns of kernels follow from that.
    An option that the talker and the code predictor have each stands twice, here with `SUBTALKER` in front.
    """

    do_sample: bool | None = _option(True)
    temperature: float | None = _filter(0.9, **_SCALE)
    top_k: int | None = _filter(50, **_COUNT)
    top_p: float | None = _filter(1.0, **_PROBABILITY)
    repetition_penalty: float | None = _option(1.05, **_SCALE)
    subtalker_dosample: bool | None = _option(True)
    subtalker_temperature: float | None = _option(0.9, **_SCALE)
    subtalker_top_k: int | None = _option(50, **_COUNT)
    subtalker_top_p: float | None = _option(1.0, **_PROBABILITY)
    max_new_tokens: int | None = _option(2048, ge=1, le=INT32_MAX)


SUBTALKER = "subtalker_"
SAMPLING_DEFAULTS = {option.name: option.metadata["official"] for option in fields(Sampling)}
# Filters of the talker; the code predictor's have SUBTALKER in front. Without `do_sample` no filter has an effect.
FILTERS = tuple(option.name for option in fields(Sampling) if option.metadata["is_filter"])


@dataclass(frozen=True, slots=True)
class ClonePrompt:
    """All that a checkpoint takes from a recording: a hundredth of its samples, and any replica speaks from it."""

    speaker: NDArray[np.float32]  # [hidden]
    codes: Codes | None = None  # [frames, num_code_groups]; None where only the speaker vector was asked for

    @property
    def nbytes(self) -> int:
        return self.speaker.nbytes + (0 if self.codes is None else self.codes.nbytes)


@dataclass(frozen=True, slots=True)
class Reference:
    """A recording to clone, and its text: the samples, or the prompt that a replica has made of them before."""

    audio: NDArray[np.float32] | None  # [samples] of mono audio at the model's sample rate; None beside a `prompt`
    text: str | None = None
    x_vector_only: bool = False
    prompt: ClonePrompt | None = None  # with codes, unless `x_vector_only`
    key: bytes = b""  # recordings of one key have the same samples; by default made from these

    def __post_init__(self) -> None:
        """Samples are hashed where a recording comes in, and nowhere later."""
        if not self.key and self.audio is not None:
            object.__setattr__(self, "key", hashlib.sha256(np.ascontiguousarray(self.audio).data).digest())

    @property
    def samples(self) -> NDArray[np.float32]:
        """The samples of a recording that comes without a prompt."""
        assert self.audio is not None, "either samples or a prompt"
        return self.audio


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an utterance has come at its reader. Its reader may ask another replica to go on with it."""

    codes: Codes  # every frame since its beginning
    samples: int  # delivered, on the codec's timeline before trimming
    in_hand_s: float = 0.0  # seconds of delivered audio that the listener has not played yet, as far as is known


@dataclass(frozen=True, slots=True)
class Mailbox:
    """The address at which a talker reads a text while it is written, as `deployments.serving.mailbox` says."""

    host: str
    port: int
    token: str  # opens this utterance alone


@dataclass(frozen=True, slots=True)
class SynthesisRequest:
    """One utterance, as the ingress asks a codec replica, or with `inline` a talker, for it."""

    request_id: str
    text: str
    voice: str | None = None  # speaker of a custom_voice checkpoint, lower case
    language: str = "auto"  # lower case
    instructions: str | None = None
    reference: Reference | None = None  # base checkpoints
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0  # 0 <= seed < 2**64
    redraws: bool = False  # any seed will do: where speech ends before any sound, the ingress asks again
    non_streaming_mode: bool | None = None  # None: as the official package does for this kind of checkpoint
    ignore_eos: bool = False  # nothing but max_new_tokens ends speech
    leading_silence: bool = False  # True keeps quiet leading frames
    continues: bool = False  # a later segment of a text that is being heard: it is not refused and goes first
    following: tuple[str, ...] = ()  # texts of the later segments: the request is refused where they do not fit
    resume: Progress | None = None  # set where a stream goes on that another replica began
    marks: Marks = ()  # stages that it has passed; empty without `server_timing`
    client: str = ""  # the client's name: the line in front of the pools tells clients apart
    word_times: bool = False  # chunks say where in the text they are
    live: Mailbox | None = None  # the text comes from there, and `text` is empty; it streams, whatever the mode
    again: bool = False  # another replica was asked before, whether or not it began
    model: str = ""  # the name of one of several models

    @property
    def is_underway(self) -> bool:
        """Whether the client has a part of this speech already. A refusal would end it in the middle."""
        return self.continues or self.resume is not None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One utterance, as a codec replica, or the ingress, asks a talker replica for it."""

    synthesis: SynthesisRequest
    reference_codes: Codes | None = None  # [frames, num_code_groups] of the reference, None without in-context cloning
    gpu_frames: int = 0  # after the delivered frames the talker brings the audio of so many; ALL_FRAMES: of all

    @property
    def prefix(self) -> Codes | None:
        """Frames of this utterance that exist already: generation goes on after them."""
        return None if self.synthesis.resume is None else self.synthesis.resume.codes


@dataclass(frozen=True, slots=True)
class Reading:
    """How far in their text consecutive frames are, as the talker's attention says."""

    first: int  # number of the first of these frames
    chars: tuple[float, ...]  # for each frame, characters of the text that are before it


@dataclass(frozen=True, slots=True)
class FrameChunk:
    """Consecutive frames of one stream. The last chunk of a stream has a `finish_reason` and may hold no frames.

    `pcm` is the next audio of the first `gpu_frames` frames. It comes in order but in its own time, in the chunk of its
    codes or in later ones, at the latest in the last. Any other chunk without frames and audio is a heartbeat.
    """

    codes: Codes
    num_text_tokens: int
    finish_reason: FinishReason | None = None
    pcm: bytes = b""  # s16le, whole frames
    marks: Marks = ()  # first audio of a marked request: all stages down to the engine and back up
    readings: tuple[Reading, ...] = ()  # empty unless `word_times` were asked for and the talker knows them
    clone_prompt: ClonePrompt | None = None  # first, of a recording that came as samples: to be sent in their place


@dataclass(frozen=True, slots=True)
class PcmChunk:
    """Audio of one stream with the codes it was decoded from. Trimming may leave less audio than the codes give.

    A chunk without codes, audio and reason is a heartbeat.
    """

    pcm: bytes  # s16le, mono, at ModelInfo.sample_rate
    codes: Codes  # frames that are new to the receiver
    num_text_tokens: int
    finish_reason: FinishReason | None = None
    position: int = 0  # samples delivered with this chunk, as in `Progress`
    marks: Marks = ()  # see FrameChunk
    readings: tuple[Reading, ...] = ()  # see FrameChunk; they may come before the audio of their frames
    text_positions: tuple[tuple[float, float], ...] = ()  # from the ingress on: (seconds of audio, characters spoken)
    seed: int | None = None  # the seed of this speech, where it is not the request's
    segment: int = 0  # number of a long text's segment, from the ingress on: the codec begins anew with each
    clone_prompt: ClonePrompt | None = None  # see FrameChunk

    @property
    def is_heartbeat(self) -> bool:
        return not len(self.codes) and not self.pcm and self.finish_reason is None

    def emptied(self) -> "PcmChunk":
        """A chunk of the same stream that brings nothing: no audio, no frames, no end."""
        return PcmChunk(
            b"", self.codes[:0], self.num_text_tokens, position=self.position, seed=self.seed, segment=self.segment
        )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts of the loaded checkpoint that the ingress needs to check a request."""

    name: str
    kind: ModelKind
    voices: tuple[str, ...]  # lower case; empty unless custom_voice
    languages: tuple[str, ...]  # lower case, without "auto"
    supports_instructions: bool
    sample_rate: int
    frame_samples: int
    num_code_groups: int
    talker_on_gpu: bool = False
    codec_precision: str = "float32"  # precision with which the talker's device decodes
    spoken_form: str | None = None  # language whose normalisation the voice needs: it has learnt only spoken words
    max_segment_chars: int = 1000  # longer texts are synthesised in segments
    word_times: bool = False  # whether its talkers say where in the text they are
    checkpoint: str = ""  # of one of several models, whose `name` clients and metrics know; empty of a single one
    # Of all that makes a clone prompt of a recording: prompts of one checkpoint fit no other. Empty unless base.
    fingerprint: str = ""

    @property
    def route(self) -> str:
        """The name of one of several models, as requests carry it; empty of a single one."""
        return self.name if self.checkpoint else ""

    @property
    def frame_s(self) -> float:
        return self.frame_samples / self.sample_rate


Marked = TypeVar("Marked", SynthesisRequest, FrameChunk, PcmChunk)


def with_mark(item: Marked, stage: str) -> Marked:
    """`item` with a mark that it has come to `stage` now. An item without marks stays as it is."""
    return replace(item, marks=(*item.marks, Mark(stage, time.time_ns()))) if item.marks else item
