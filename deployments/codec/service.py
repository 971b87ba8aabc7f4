"""What a codec replica does, without Ray: a request and a source of frames in, PCM out."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

from deployments.codec.batcher import Decoded, DecodeGate, DecodeJob, decode_batch
from deployments.codec.chunking import ChunkPlan
from deployments.codec.loading import load_codec
from deployments.codec.silence import LeadingSilence
from deployments.codec.state import DecoderState
from deployments.codec.stream import Decode, StreamDecoder
from deployments.config import CodecConfig
from deployments.protocol import Codes, FrameChunk, GenerateRequest, PcmChunk, SynthesisRequest

Generate = Callable[[GenerateRequest], AsyncGenerator[FrameChunk, None]]


class CodecService:
    """Streams share the worker threads through a gate in which the most urgent ones go first."""

    def __init__(self, model: str, config: CodecConfig, *, decode: Decode) -> None:
        """`decode` takes one job; it is called for all jobs of a batch at once and ends in `decode_batch`."""
        self._codec = load_codec(model, config)
        self._ramp = config.chunk_frames
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="codec")
        self.gate = DecodeGate(decode, workers=config.workers, max_batch_size=config.max_batch_size)

    async def synthesize(self, request: SynthesisRequest, generate: Generate) -> AsyncGenerator[PcmChunk, None]:
        """Audio of one utterance whose frames come from `generate`; raises what `generate` raises."""
        reference_codes, state = await self._begin(request)
        silence = None if request.leading_silence else LeadingSilence(self._codec.sample_rate)
        plan = ChunkPlan(self._ramp)
        decoder = StreamDecoder(self.gate.submit, plan, silence, sample_rate=self._codec.sample_rate)
        async with aclosing(decoder.run(generate(GenerateRequest(request, reference_codes)), state)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def decode_batch(self, jobs: list[DecodeJob]) -> list[Decoded | Exception]:
        """Decode chunks of several streams on a worker thread; a job that fails gets its own exception."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, decode_batch, self._codec.decoder, jobs)

    async def _begin(self, request: SynthesisRequest) -> tuple[Codes | None, DecoderState]:
        """The reference's codes, and the state decoding begins in: speech goes on from where the recording ends."""
        reference = request.reference
        if reference is None or reference.x_vector_only:
            return None, self._codec.decoder.initial_state()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._codec.encode_reference, reference.audio)
