"""The work of a codec replica, independent of Ray: turn a request and a source of frames into PCM."""

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from deployments.codec.batch import Decoded, DecodeTask, decode_batch
from deployments.codec.decoder_state import DecoderState
from deployments.codec.plan import ChunkPlan
from deployments.codec.pool.codec import decodes_in_processes, device_of, load_codec
from deployments.codec.pool.gate import DecodeGate
from deployments.codec.pool.ramps import MANY_WORKERS, chosen_ramp, fitted_ramp, longest_call_s
from deployments.codec.pool.stream import Decode, DecodingStart, StreamDecoder
from deployments.codec.pool.workers import DecoderChoice, WorkerProcesses, Workers
from deployments.config import CodecConfig, CodecPlacement
from deployments.protocol import ALL_FRAMES, Codes, FrameChunk, PcmChunk, Progress, SynthesisRequest
from deployments.serving import metrics
from deployments.serving.failover import with_failover
from deployments.serving.replica_streams import Generate, TalkerStream
from deployments.speech_detection import EndingGuard, LeadingSilence

_GPU_FRAMES = 9  # number of first frames decoded on the GPU while the pool is idle; a CPU needs this time to take over


class AllFrames(TalkerStream[FrameChunk]):
    """Stream of all frames after the request's prefix, unchanged."""

    def receive(self, chunk: FrameChunk) -> FrameChunk:
        self._collect(chunk)
        return chunk


class Placement:
    """Split of streams between the talker's GPU and this replica, based on the replica's free capacity."""

    def __init__(self, placement: CodecPlacement, *, beside: "Placement | None" = None) -> None:
        """Create the `placement` of one of several models. `beside` is another model's placement on this replica."""
        self._placement = placement
        self._counter = beside or self
        self._num_here = 0  # streams that this replica decodes, across all models
        self.talker_on_gpu = False  # set after a talker has reported its device

    @contextmanager
    def admit(self, capacity: float, *, background: bool = False) -> Iterator[int]:
        """Admit a stream during the context. Yields the number of frames to request from the GPU.

        `capacity` is the number of streams that the workers can decode. Job segments are not counted, because they
        take no workers away from other streams.
        """
        gpu_frames = 0 if background and self._placement != "inline" else self._gpu_frames(capacity)
        decodes_here = gpu_frames < ALL_FRAMES and not background
        self._counter._num_here += decodes_here
        try:
            yield gpu_frames
        finally:
            self._counter._num_here -= decodes_here

    def _gpu_frames(self, capacity: float) -> int:
        """Return the number of frames for the GPU: `_GPU_FRAMES` for an idle pool, more for a busy one, else all."""
        if self._placement == "inline":
            return ALL_FRAMES
        if self._placement == "pool" or not self.talker_on_gpu:
            return 0
        busy = (self._counter._num_here + 1) / capacity
        return ALL_FRAMES if busy >= 1.0 else round(_GPU_FRAMES / (1 - busy))


class CodecService:
    """A replica's decoding service. Streams share the workers through a gate that serves urgent streams first."""

    def __init__(
        self,
        model: str,
        config: CodecConfig,
        *,
        decode: Decode,
        placements: Mapping[str, CodecPlacement] = MappingProxyType({}),
    ) -> None:
        """Load the codec of `model`. `decode` takes one task; its batched implementation ends in `decode_batch`.

        `placements` has an entry for each of several models. The placement is always "pool" for talkers without a GPU.
        """
        self._codec = load_codec(model, config)
        self._ramp = chosen_ramp(config.workers)
        self._repaired = 0
        self._shares_calls = config.workers >= MANY_WORKERS
        warm_up_result = self._codec.warm_up_result
        self.workers = Workers(config.workers, on_gpu=device_of(config) != "cpu")
        self._readers = Workers(config.workers, on_gpu=False)  # for recordings, separate from chunk decoding
        self._processes: WorkerProcesses | None = None
        if decodes_in_processes(config):
            decoder, longest_s = self._codec.decoder, longest_call_s(config.workers)
            choice = DecoderChoice(str(self._codec.directory), decoder.precision, self._ramp, longest_s)
            self._processes = WorkerProcesses(config.workers, decoder, choice)
            warm_up_result = self._processes.warm_up_result
        self.gate = DecodeGate(
            decode,
            workers=config.workers,
            frame_s=self.frame_s,
            largest=warm_up_result.largest_batches,
            tried_s=warm_up_result.seconds_per_frame,
        )
        self.placement = Placement(config.placement)
        self._placements = {name: Placement(own, beside=self.placement) for name, own in placements.items()}
        for placement in self._placements.values():
            placement.talker_on_gpu = True  # talkers without a GPU have the placement "pool"

    @property
    def frame_s(self) -> float:
        return self._codec.config.frame_s

    def placement_of(self, model: str) -> Placement:
        """Return the placement for one of several models, or for the only model."""
        return self._placements.get(model, self.placement)

    @property
    def failure(self) -> str | None:
        """Description of a permanent failure, or None."""
        if self.workers.hang or self._readers.hang:
            return "a decoder thread of this codec replica is hung"
        if self._processes is not None and self._processes.is_broken:
            return "the parent process of this codec replica's decoder processes has ended"
        return None

    async def decode_stream(self, request: SynthesisRequest, generate: Generate) -> AsyncGenerator[PcmChunk, None]:
        """Yield the audio of one segment, made from the frames of `generate`. Raises the errors of `generate`."""
        reference_codes, state = await self._begin(request)
        start = self._start(request.resume, reference_codes, state)
        frame_samples, sample_rate = self._codec.config.frame_samples, self._codec.config.sample_rate
        trims = not request.leading_silence and not start.position
        costs, wait_s = self.gate.seconds_per_frame, self.gate.wait_s
        ramp = fitted_ramp(self._ramp, costs, wait_s=wait_s, frame_s=self.frame_s, shared=self._shares_calls)
        decoder = StreamDecoder(
            self.gate.submit,
            ChunkPlan(ramp, frame_s=self.frame_s),
            start,
            frame_samples=frame_samples,
            sample_rate=sample_rate,
            silence=LeadingSilence(sample_rate) if trims else None,
            guard=None if request.ignore_eos else EndingGuard(frame_samples, sample_rate, position=start.position),
            load=lambda: self.gate.load,
            background=request.background,
        )
        with self.placement_of(request.model).admit(self.gate.capacity, background=request.background) as gpu_frames:
            if start.undelivered is not None and len(start.undelivered):
                gpu_frames = 0  # the talker will not decode the frames whose audio is missing here
            asked = replace(request, reference_codes=reference_codes, gpu_frames=gpu_frames)
            frames = with_failover(AllFrames(generate, asked, frame_samples))
            async with aclosing(decoder.decode_chunks(frames, gpu_frames=gpu_frames)) as chunks:
                async for chunk in chunks:
                    yield chunk

    def forget(self, voices: tuple[bytes, ...]) -> int:
        """Drop cached results for `voices`. Returns the number of results dropped."""
        return self._codec.forget(voices)

    async def decode_batch(self, tasks: list[DecodeTask]) -> list[Decoded | Exception]:
        """Decode chunks of several streams on one worker. Each failing task gets its own exception."""
        self.gate.note_gathered()
        decoder = self._codec.decoder
        if self._processes is None:
            outcomes = await self.workers.run(decode_batch, decoder, tasks)
        else:
            outcomes = await self.workers.run(self._processes.decode, tasks)
        metrics.REPAIRS.record(decoder.repaired - self._repaired, pool="codec")
        self._repaired = decoder.repaired
        return outcomes

    async def _begin(self, request: SynthesisRequest) -> tuple[Codes | None, DecoderState]:
        """Return the reference's codes, and the decoder state after them, from which the speech continues."""
        reference = request.reference
        if reference is None or reference.x_vector_only:
            return None, self._codec.decoder.initial_state()
        cached = self._codec.find(reference)
        if cached is not None:
            return cached  # without waiting for a worker
        prepared = await self._readers.run(self._codec.read, reference)
        metrics.record_recording_lookups("codes", self._codec.references.take_lookups())
        return prepared

    def _start(self, resume: Progress | None, reference_codes: Codes | None, state: DecoderState) -> DecodingStart:
        """Return where to start decoding: after the reference, or where another replica stopped."""
        if resume is None or not len(resume.codes):
            return DecodingStart(state)
        decoder, to_recall = self._codec.decoder, None
        num_done, skipped = divmod(resume.samples, decoder.frame_samples)
        if num_done:
            before = [] if reference_codes is None else [reference_codes]
            to_recall = np.concatenate([*before, resume.codes[:num_done]])[-decoder.config.reach :]
            state = decoder.initial_state()
        return DecodingStart(state, to_recall, resume.codes[num_done:], resume.samples, skipped, resume.in_hand_s)
