"""A synthesizer that follows a script, and remembers what it was asked."""

import asyncio
from collections.abc import AsyncGenerator, Container, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from deployments.errors import NotReady
from deployments.protocol import FinishReason, ModelInfo, ModelKind, PcmChunk, Reading, SynthesisRequest
from deployments.serving.mailbox import read

CUSTOM_VOICE = ModelInfo(
    name="Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
    kind=ModelKind.CUSTOM_VOICE,
    voices=("serena", "vivian", "uncle_fu", "ryan", "aiden", "ono_anna", "sohee", "eric", "dylan"),
    languages=("chinese", "english", "german"),
    supports_instructions=True,
    sample_rate=24000,
    frame_samples=1920,
    num_code_groups=16,
)
VOICE_DESIGN = replace(CUSTOM_VOICE, name="design", kind=ModelKind.VOICE_DESIGN, voices=())
FOLLOWED = replace(CUSTOM_VOICE, word_times=True)
BASE = replace(CUSTOM_VOICE, name="base", kind=ModelKind.BASE, voices=(), supports_instructions=False)

NUM_TEXT_TOKENS = 7

Step = PcmChunk | Exception | asyncio.Event  # yielded, raised, awaited


class FakeSynthesizer:
    """Yields `script` for each request, after `scripts` for the first ones. A stream that ends has taken all of its
    live text, except in the requests whose numbers are in `hasty`.
    """

    def __init__(
        self,
        info: ModelInfo | None = CUSTOM_VOICE,
        script: Sequence[Step] = (),
        *,
        scripts: Iterable[Sequence[Step]] = (),
        hasty: Container[int] = (),
    ) -> None:
        self.info = info
        self.script = script
        self.scripts = list(scripts)
        self._hasty = hasty
        self.requests: list[SynthesisRequest] = []
        self.texts: list[str] = []  # of the requests, as far as they have been written
        self.waiting = asyncio.Event()  # inside an awaited step
        self.closed = asyncio.Event()

    async def describe(self) -> ModelInfo:
        if self.info is None:
            raise NotReady
        return self.info

    async def synthesize(self, request: SynthesisRequest, info: object = None) -> AsyncGenerator[PcmChunk, None]:
        number = len(self.texts)
        self.requests.append(request)
        self.texts.append(request.text)
        self.closed.clear()
        reading = asyncio.create_task(self._read(request, number))
        try:
            for step in self.scripts.pop(0) if self.scripts else self.script:
                match step:
                    case PcmChunk():
                        if step.finish_reason is not None and number not in self._hasty:
                            await reading
                        yield step
                    case Exception():
                        raise step
                    case asyncio.Event():
                        self.waiting.set()
                        await step.wait()
        finally:
            reading.cancel()
            self.closed.set()

    async def _read(self, request: SynthesisRequest, index: int) -> None:
        """A live text to its end, as a talker does."""
        if request.mailbox is not None:
            async with aclosing(read(request.mailbox)) as parts:
                async for part in parts:
                    self.texts[index] += part


def tone(num_samples: int, *, start: int = 0, sample_rate: int = CUSTOM_VOICE.sample_rate) -> bytes:
    """440 Hz as s16le; pieces that follow each other make one tone."""
    phase = 2 * np.pi * 440 * np.arange(start, start + num_samples) / sample_rate
    return (np.sin(phase) * 9000).astype("<i2").tobytes()


def chunk(pcm: bytes, *, frames: int = 1, finish_reason: FinishReason | None = None) -> PcmChunk:
    codes = np.zeros((frames, CUSTOM_VOICE.num_code_groups), np.int16)
    return PcmChunk(pcm, codes, NUM_TEXT_TOKENS, finish_reason)


def utterance(num_frames: int = 4) -> list[PcmChunk]:
    """Chunks of one frame, then the empty one that ends a stream."""
    size = CUSTOM_VOICE.frame_samples
    spoken = [chunk(tone(size, start=index * size)) for index in range(num_frames)]
    return [*spoken, chunk(b"", frames=0, finish_reason=FinishReason.STOP)]


# What the readings of `followed` make of this text: when each word begins, in milliseconds; the last one ends at 880.
FOLLOWED_TEXT = "Hello there all of you"
FOLLOWED_MS = (0, 280, 520, 680, 800)


def followed(num_frames: int = 11) -> list[PcmChunk]:
    """As `utterance`, whose frames have come two characters further each: `num_frames` of the eleven, and no end
    unless all are there.
    """
    *frames, end = utterance(11)
    size = CUSTOM_VOICE.frame_samples
    read = [
        replace(frame, readings=(Reading(number, (2.0 * number,)),), position=(number + 1) * size)
        for number, frame in enumerate(frames)
    ]
    return [*read, replace(end, position=11 * size)] if num_frames == 11 else read[:num_frames]


# The same of `estimated`: the last two words share what is left behind the beginning of "all", by their letters.
ESTIMATED_MS = (0, 280, 520, 664, 772)


def estimated() -> list[PcmChunk]:
    """The frames of `followed`, of which the last four bring no reading."""
    frames = followed()
    return [*frames[:7], *(replace(frame, readings=()) for frame in frames[7:])]


def pcm_of(chunks: Sequence[PcmChunk]) -> bytes:
    return b"".join(item.pcm for item in chunks)
