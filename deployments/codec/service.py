"""What a codec replica does, without Ray: a request and a source of frames in, PCM out."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from deployments import metrics
from deployments.codec.batcher import Decoded, DecodeGate, DecodeJob, decode_batch
from deployments.codec.chunking import ChunkPlan
from deployments.codec.frames import Generate, all_frames
from deployments.codec.loading import load_codec
from deployments.codec.placement import Placement
from deployments.codec.silence import LeadingSilence
from deployments.codec.state import DecoderState
from deployments.codec.stream import Decode, Opening, Start, StreamDecoder
from deployments.codec.workers import Workers
from deployments.config import CodecConfig
from deployments.protocol import Codes, GenerateRequest, PcmChunk, Resume, SynthesisRequest


class CodecService:
    """Streams share the worker threads through a gate in which the most urgent ones go first."""

    def __init__(self, model: str, config: CodecConfig, *, decode: Decode) -> None:
        """`decode` takes one job; it is called for all jobs of a batch at once and ends in `decode_batch`."""
        self._codec = load_codec(model, config)
        self._ramp = config.chunk_frames
        self.workers = Workers(config.workers, on_gpu=self._codec.decoder.device.type == "cuda")
        self.gate = DecodeGate(
            decode,
            workers=config.workers,
            max_batch_size=config.max_batch_size,
            max_batch_frames=config.max_batch_frames,
            max_call_s=config.max_call_s,
            largest=self._codec.largest_batches,
        )
        self.placement = Placement(config, frame_s=self._codec.decoder.frame_samples / self._codec.sample_rate)

    async def synthesize(self, request: SynthesisRequest, generate: Generate) -> AsyncGenerator[PcmChunk, None]:
        """Audio of one utterance whose frames come from `generate`; raises what `generate` raises."""
        reference_codes, state = await self._begin(request)
        start = self._start(request.resume, reference_codes, state)
        trims = not request.leading_silence and not start.position + start.skipped
        silence = LeadingSilence(self._codec.sample_rate) if trims else None
        plan = ChunkPlan(self._ramp)
        decoder = StreamDecoder(
            self.gate.submit, plan, silence, sample_rate=self._codec.sample_rate, load=lambda: self.gate.load
        )
        with self.placement.admit(self.gate.seconds_per_frame) as gpu_frames:
            opening = self._opening(gpu_frames, start)
            asked = replace(_generate_request(request, reference_codes), gpu_frames=opening.frames if opening else 0)
            frames = all_frames(generate, asked, frame_bytes=2 * self._codec.decoder.frame_samples)
            async with aclosing(decoder.run(frames, start, opening)) as chunks:
                async for chunk in chunks:
                    yield chunk

    def _opening(self, gpu_frames: int, start: Start) -> Opening | None:
        """What the talker decodes; nothing, where audio is missing that it will not bring."""
        if not gpu_frames or (start.undelivered is not None and len(start.undelivered)):
            return None
        return Opening(gpu_frames, 2 * self._codec.decoder.frame_samples)

    async def decode_batch(self, jobs: list[DecodeJob]) -> list[Decoded | Exception]:
        """Decode chunks of several streams on a worker thread; a job that fails gets its own exception."""
        return await self.workers.run(decode_batch, self._codec.decoder, jobs)

    async def _begin(self, request: SynthesisRequest) -> tuple[Codes | None, DecoderState]:
        """The reference's codes, and the state decoding begins in: speech goes on from where the recording ends."""
        reference = request.reference
        if reference is None or reference.x_vector_only:
            return None, self._codec.decoder.initial_state()
        begun = await self.workers.run(self._codec.encode_reference, reference.audio)
        metrics.references("codes", self._codec.references.take_lookups())
        return begun

    def _start(self, resume: Resume | None, reference_codes: Codes | None, state: DecoderState) -> Start:
        """Behind the reference, or where another replica stopped: its state is remade from the codes."""
        if resume is None or not len(resume.codes):
            return Start(state)
        decoder, behind = self._codec.decoder, None
        num_done, skipped = divmod(resume.position, decoder.frame_samples)
        if num_done:
            before = [] if reference_codes is None else [reference_codes]
            behind = np.concatenate([*before, resume.codes[:num_done]])[-decoder.reach :]
            state = decoder.initial_state()
        return Start(state, behind, resume.codes[num_done:], num_done * decoder.frame_samples, skipped)


def _generate_request(request: SynthesisRequest, reference_codes: Codes | None) -> GenerateRequest:
    if request.resume is None:
        return GenerateRequest(request, reference_codes)
    return GenerateRequest(replace(request, resume=None), reference_codes, request.resume.codes)
