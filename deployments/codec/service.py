"""What a codec replica does, without Ray: a request and a source of frames in, PCM out."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import torch

from deployments.codec.batcher import Decoded, DecodeGate, DecodeJob, decode_batch
from deployments.codec.chunking import ChunkPlan
from deployments.codec.loading import load_codec
from deployments.codec.silence import LeadingSilence
from deployments.codec.state import DecoderState
from deployments.codec.stream import Decode, Start, StreamDecoder
from deployments.codec.workers import Workers
from deployments.config import CodecConfig
from deployments.errors import TalkerLost
from deployments.failover import persist
from deployments.protocol import Codes, FrameChunk, GenerateRequest, PcmChunk, Resume, SynthesisRequest

Generate = Callable[[GenerateRequest], AsyncGenerator[FrameChunk, None]]


class CodecService:
    """Streams share the worker threads through a gate in which the most urgent ones go first."""

    def __init__(self, model: str, config: CodecConfig, *, decode: Decode) -> None:
        """`decode` takes one job; it is called for all jobs of a batch at once and ends in `decode_batch`."""
        self._codec = load_codec(model, config)
        self._ramp = config.chunk_frames
        self.workers = Workers(config.workers, on_gpu=self._codec.decoder.device.type == "cuda")
        self.gate = DecodeGate(decode, workers=config.workers, max_batch_size=config.max_batch_size)

    async def synthesize(self, request: SynthesisRequest, generate: Generate) -> AsyncGenerator[PcmChunk, None]:
        """Audio of one utterance whose frames come from `generate`; raises what `generate` raises."""
        reference_codes, state = await self._begin(request)
        start = await self._start(request.resume, reference_codes, state)
        trims = not request.leading_silence and not start.position + start.skipped
        silence = LeadingSilence(self._codec.sample_rate) if trims else None
        plan = ChunkPlan(self._ramp)
        decoder = StreamDecoder(self.gate.submit, plan, silence, sample_rate=self._codec.sample_rate)
        frames = all_frames(generate, _generate_request(request, reference_codes))
        async with aclosing(decoder.run(frames, start)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def decode_batch(self, jobs: list[DecodeJob]) -> list[Decoded | Exception]:
        """Decode chunks of several streams on a worker thread; a job that fails gets its own exception."""
        return await self.workers.run(decode_batch, self._codec.decoder, jobs)

    async def _begin(self, request: SynthesisRequest) -> tuple[Codes | None, DecoderState]:
        """The reference's codes, and the state decoding begins in: speech goes on from where the recording ends."""
        reference = request.reference
        if reference is None or reference.x_vector_only:
            return None, self._codec.decoder.initial_state()
        return await self.workers.run(self._codec.encode_reference, reference.audio)

    async def _start(self, resume: Resume | None, reference_codes: Codes | None, state: DecoderState) -> Start:
        """Behind the reference, or where another replica stopped: its state is remade from the codes."""
        if resume is None or not len(resume.codes):
            return Start(state)
        decoder = self._codec.decoder
        num_done, skipped = divmod(resume.position, decoder.frame_samples)
        if num_done:
            behind = [] if reference_codes is None else [reference_codes]
            codes = torch.from_numpy(np.concatenate([*behind, resume.codes[:num_done]]).astype(np.int64))
            state = await self.workers.run(decoder.recall, codes)
        return Start(state, resume.codes[num_done:], num_done * decoder.frame_samples, skipped)


def _generate_request(request: SynthesisRequest, reference_codes: Codes | None) -> GenerateRequest:
    if request.resume is None:
        return GenerateRequest(request, reference_codes)
    return GenerateRequest(replace(request, resume=None), reference_codes, request.resume.codes)


async def all_frames(generate: Generate, request: GenerateRequest) -> AsyncGenerator[FrameChunk, None]:
    """Frames of an utterance behind `request.prefix`, to its end: a talker that is lost is followed by another one."""
    frames = [] if request.prefix is None else [request.prefix]

    def ask() -> AsyncGenerator[FrameChunk, None]:
        prefix = np.concatenate(frames) if frames else None
        return generate(replace(request, prefix=prefix))

    async with aclosing(persist(ask, request_id=request.synthesis.request_id, lost=TalkerLost)) as chunks:
        async for chunk in chunks:
            if len(chunk.codes):
                frames.append(chunk.codes)
            yield chunk
