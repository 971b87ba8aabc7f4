"""Driving an engine by hand: requests with defaults, and steps until nothing is left to do."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from deployments import protocol
from deployments.errors import InvalidRequest
from deployments.protocol import ClonePrompt, Codes, FinishReason, FrameChunk, Reference, Sampling, SynthesisRequest
from deployments.talker.engine.engine import Engine

GREEDY = Sampling(do_sample=False, subtalker_dosample=False, repetition_penalty=1.0)


@dataclass(frozen=True, slots=True)
class Spoken:
    codes: Codes  # [frames, groups]
    reason: FinishReason
    num_text_tokens: int

    @classmethod
    def join(cls, chunks: list[FrameChunk]) -> "Spoken":
        """Only the last chunk may have a reason."""
        assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].finish_reason is not None
        codes = np.concatenate([chunk.codes for chunk in chunks])
        return cls(codes, chunks[-1].finish_reason, chunks[-1].num_text_tokens)


def ask(
    text: str = "Hello there.", *, frames: int = 20, sampling: Sampling | None = None, **changes: object
) -> SynthesisRequest:
    """A request whose speech ends after `frames` frames at the latest; `changes` are fields of the utterance."""
    options = replace(sampling or Sampling(), max_new_tokens=frames + 1)
    fields = {"voice": "ryan", "seed": 7, **changes}
    return SynthesisRequest("test", text, sampling=options, **fields)  # type: ignore[arg-type]


def resumed(request: SynthesisRequest, codes: Codes, *, samples: int = 0) -> SynthesisRequest:
    """`request` as another replica goes on with it: after `codes`, of which `samples` have been delivered."""
    return replace(request, resume=protocol.Progress(codes, samples))


def drain(engine: Engine, failures: dict[int, Exception] | None = None) -> dict[int, Spoken]:
    """Step until nothing is left: what each sequence said from here on. Only where `failures` collects them may any
    sequence fail.
    """
    chunks: dict[int, list[FrameChunk]] = {}
    failed: dict[int, Exception] = {}
    while not engine.is_idle:
        output = engine.step()
        failed.update(output.failures)
        for number, chunk in output.chunks:
            chunks.setdefault(number, []).append(chunk)
    engine.check_integrity()
    if failures is None:
        assert failed == {}
    else:
        failures.update(failed)
    return {number: Spoken.join(of_one) for number, of_one in chunks.items()}


def chunks_of(engine: Engine, request: SynthesisRequest) -> list[FrameChunk]:
    engine.add(0, request)
    chunks = []
    while not engine.is_idle:
        chunks += [chunk for _, chunk in engine.step().chunks]
    engine.check_integrity()
    return chunks


def speak(engine: Engine, request: SynthesisRequest) -> Spoken:
    engine.add(0, request)
    return drain(engine)[0]


def speak_all(engine: Engine, requests: Iterable[SynthesisRequest], *, steps_between: int = 0) -> list[Spoken]:
    chunks: dict[int, list[FrameChunk]] = {}
    waiting = list(enumerate(requests))
    steps = 0
    while waiting or not engine.is_idle:
        while waiting and steps >= waiting[0][0] * steps_between:
            engine.add(*waiting.pop(0))
        for number, chunk in engine.step().chunks:
            chunks.setdefault(number, []).append(chunk)
        steps += 1
    engine.check_integrity()
    return [Spoken.join(chunks[number]) for number in sorted(chunks)]


@dataclass(slots=True)
class Encoding:
    """One that is done when a test says so."""

    result: ClonePrompt
    is_done: bool = False

    def prompt(self) -> ClonePrompt:
        return self.result

    def codes(self) -> Codes:
        assert self.result.codes is not None
        return self.result.codes


@dataclass(slots=True)
class Recordings:
    """What `RecordingEncoder` is on a GPU: `encode` makes the prompt."""

    encode: Callable[[Reference], ClonePrompt]
    started: list[Encoding] = field(default_factory=list)

    def start(self, reference: Reference) -> Encoding:
        if len(reference.samples) < 1000:
            raise InvalidRequest("ref_audio is too short", "ref_audio")
        self.started.append(Encoding(self.encode(reference)))
        return self.started[-1]
