"""Stored records of a job: its description, its plan, its state, and the names of its finished segments.

A job has one *part* for each entry of `inputs`. Each part consists of *segments*, whose texts are fixed when the client
creates the job. A restarted job synthesizes only the missing segments.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, TypeAdapter

from deployments.config import Strict
from deployments.protocol import FinishReason, ModelInfo, Reference, Sampling, SynthesisRequest
from serve_app.api.parsing.speech_body import PASSED_ON
from serve_app.extensions.text.lexicon import MAX_WORDS, Lexicon
from serve_app.extensions.text.markup import Markup
from serve_app.extensions.text.spoken_text import TextRules, read
from serve_app.extensions.text.style_tags import StyleRules
from serve_app.speech.segments import Utterance, segment_seed
from serve_app.text.spoken import SpokenText, TextSpan

JOB_ID = re.compile(r"job_[0-9a-f]{24}")
_NAME = re.compile(r"(\d{6})\.(\d{5})\.(\d+)\.([a-z]+)\.([01])")
MOST_PARTS = 10**6 - 1  # a segment's name has six digits for the part
MOST_SEGMENTS = 5000  # per part; 200,000 characters make at most 4,000 segments
LONGEST_LINE = 2000
_MOST_WORDS = 1000 * MAX_WORDS  # total of the request's, the voice's and the server's lexicons
_INFO = TypeAdapter(ModelInfo)
_OLDER = ConfigDict(extra="ignore")  # jobs created as OpenAI batches have more fields
_Line = Annotated[str, Field(max_length=LONGEST_LINE)]
_Text = Annotated[str, Field(max_length=1 << 24)]  # maximum size of a request body


class JobStatus(StrEnum):
    """Status of a job, as the API reports it."""

    QUEUED = "queued"  # before the first segment
    RUNNING = "running"
    PAUSED = "paused"  # the job continues when the reported reason no longer applies
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Rules(Strict):
    """Stored form of the `TextRules` that applied when the client created the job."""

    markup: Markup
    paragraph_pause_s: float
    lexicon: Annotated[dict[_Line, _Line], Field(max_length=_MOST_WORDS)]
    spoken_form: _Line | None
    max_segment_chars: int | None
    normalised: _Line | None
    styles: StyleRules = Field(default_factory=StyleRules)

    @classmethod
    def of(cls, rules: TextRules) -> Self:
        fields = {name: getattr(rules, name) for name in cls.model_fields if name != "lexicon"}
        return cls(**fields, lexicon=rules.lexicon.words)

    def text_rules(self) -> TextRules:
        return TextRules(**{**dict(self), "lexicon": Lexicon(self.lexicon)})


class Manner(Strict):
    """Voice and sampling options, which several parts can share."""

    model: _Line  # `SynthesisRequest.model`
    voice: _Line | None  # a built-in speaker of the checkpoint
    stored_voice: _Line | None = None  # the ID of a stored voice, instead of `voice`
    style: _Line = ""  # of the stored voice's recording
    x_vector_only: bool = False
    language: _Line
    instructions: _Text | None
    sampling: Annotated[dict[_Line, bool | int | float], Field(max_length=100)]
    non_streaming_mode: bool | None
    ignore_eos: bool
    leading_silence: bool

    @classmethod
    def of(cls, request: SynthesisRequest, **stored: Any) -> Self:
        same = ("model", "voice", "language", "instructions", *PASSED_ON)
        options = {name: getattr(request.sampling, name) for name in Sampling.__dataclass_fields__}
        sampling = {name: value for name, value in options.items() if value is not None}
        return cls(**{name: getattr(request, name) for name in same}, sampling=sampling, **stored)


class Segment(Strict):
    """Text that one `SynthesisRequest` speaks. An option that is None takes its value from the part's `Manner`."""

    text: _Text
    pause_s: float = 0.0  # silence before the segment
    speed: float = 1.0
    language: _Line | None = None
    instructions: _Text | None = None
    take: _Line | None = None  # style of the stored voice's recording


class Part(Strict):
    """Plan of one entry of `inputs`."""

    model_config = _OLDER

    sent: _Text
    rules: int  # index in JobPlan.rules
    manner: int  # index in JobPlan.manners
    seed: int
    redraws: bool  # whether the server regenerates a faulty segment with another seed
    segments: Annotated[tuple[Segment, ...], Field(max_length=MOST_SEGMENTS)]
    end_pause_s: float = 0.0  # silence after the last segment
    custom_id: _Line | None = None


class JobPlan(Strict):
    """One piece of a job's plan: consecutive parts with their rules and manners."""

    rules: Annotated[tuple[Rules, ...], Field(max_length=MOST_PARTS)]
    manners: Annotated[tuple[Manner, ...], Field(max_length=MOST_PARTS)]
    parts: Annotated[tuple[Part, ...], Field(max_length=MOST_PARTS)]
    first: int = 0  # number of the first part

    def has(self, part: int) -> bool:
        return self.first <= part < self.first + len(self.parts)

    def part(self, number: int) -> Part:
        return self.parts[number - self.first]

    def spoken_text(self, part: Part) -> SpokenText:
        """Return the text of the part with its spoken form. Blocks if the text is long."""
        return read(part.sent, self.rules[part.rules].text_rules())

    def utterance(self, job: "StoredJob", segment_id: "SegmentId", reference: Reference | None) -> Utterance:
        part = self.part(segment_id.part)
        segment, manner = part.segments[segment_id.segment], self.manners[part.manner]
        same = ("model", "voice", "instructions", *PASSED_ON)
        synthesis = SynthesisRequest(
            request_id=f"{job.id}.{segment_id.part}.{segment_id.segment}",
            text=segment.text,
            client=f"jobs of {job.owner}",
            language=segment.language or manner.language,
            reference=reference,
            sampling=Sampling(**manner.sampling),  # type: ignore[arg-type]
            seed=segment_seed(part.seed, segment_id.segment),
            word_times=True,
            background=True,
            **{name: getattr(manner, name) for name in same},
        )
        if segment.instructions is not None:
            synthesis = replace(synthesis, instructions=segment.instructions)
        span = TextSpan(segment.text, speed=segment.speed)
        return Utterance(synthesis, spans=(span,), may_redraw=part.redraws)


class StoredJob(Strict):
    """Immutable description of a job. Progress is recorded in the state and the finished segments."""

    model_config = _OLDER

    id: _Line
    owner: _Line
    created_at: int  # seconds since 1970
    key: _Line | None = None  # the client's Idempotency-Key
    fingerprint: _Line  # SHA-256 of the fields in the request
    # ModelInfo by `SynthesisRequest.model`
    models: Annotated[dict[_Line, Annotated[dict[_Line, Any], Field(max_length=100)]], Field(max_length=1000)]
    num_segments: Annotated[tuple[int, ...], Field(max_length=MOST_PARTS)]  # per part
    pieces: Annotated[tuple[int, ...], Field(max_length=MOST_PARTS)] = ()  # first part of each piece of the plan
    plan_bytes: int = 0  # total size of all pieces in the store
    webhook: _Line | None = None  # URL to call when the job ends
    deterministic: bool = False  # whether the job fails if a retry could produce different codes

    def info(self, model: str) -> ModelInfo:
        return _INFO.validate_python(self.models[model])

    @staticmethod
    def described(info: ModelInfo) -> dict[str, Any]:
        """Return an entry for `models`, as JSON values."""
        fields: dict[str, Any] = _INFO.dump_python(info, mode="json")
        return fields


class JobState(Strict):
    """How a job has ended, if it has, and the calls of its webhook."""

    model_config = _OLDER

    cancelled: bool = False
    failed: _Line | None = None  # why the job failed
    ended_at: int | None = None  # seconds since 1970
    calls: int = 0  # number of webhook calls made
    call_error: _Line | None = None  # why the last call failed
    called_at: int | None = None  # time of the first successful call, or of the last failed one


@dataclass(frozen=True, slots=True, order=True)
class SegmentId:
    """Identifies a segment in a job. Both numbers start at 0."""

    part: int
    segment: int

    def __str__(self) -> str:
        return f"part {self.part}, segment {self.segment}"


@dataclass(frozen=True, slots=True)
class MadeSegment:
    """A finished segment, parsed from its file name. Together, the segment file names record a job's progress."""

    id: SegmentId
    samples: int  # at the model's sample rate, after any change of speed
    finish_reason: FinishReason
    was_redrawn: bool

    @property
    def name(self) -> str:
        where = f"{self.id.part:06d}.{self.id.segment:05d}"
        return f"{where}.{self.samples}.{self.finish_reason}.{int(self.was_redrawn)}"

    def as_json(self) -> dict[str, object]:
        named = {"part": self.id.part, "segment": self.id.segment}
        return {**named, "finish_reason": self.finish_reason, "redrawn": self.was_redrawn}

    @classmethod
    def of(cls, name: str) -> Self | None:
        """Parse the file name of a segment. Return None for any other file name."""
        match = _NAME.fullmatch(name)
        if match is None or match[4] not in set(FinishReason):
            return None
        segment_id, reason = SegmentId(int(match[1]), int(match[2])), FinishReason(match[4])
        return cls(segment_id, int(match[3]), finish_reason=reason, was_redrawn=match[5] == "1")
