"""Decoder slots on a GPU, with captured Triton kernel calls."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deployments.codec.codec_config import MAX_CALL_FRAMES, MAX_FRAMES, DecoderConfig, call_frames
from deployments.codec.decoder import MIN_SNR_DB, Backend, CodecDecoder, describe_choice, snr_db, to_pcm16
from deployments.codec.decoder_state import DecoderState
from deployments.codec.fold import FoldedWeights
from deployments.codec.plan import GPU_RAMP, call_sizes, recall_sizes, split_frames
from deployments.codec.slots import CODE_RING, DecodeCall, Precompile, SlotDecoder
from deployments.errors import EngineError
from deployments.gpu.graphs import Graphs, Staging, buckets
from deployments.protocol import Pcm

# Numbers of streams for which calls are captured. They are close together to keep the padding of a call small.
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, *range(96, 4096, 32))
_STAGED_WRITES = 16  # rows of staging memory; each can hold all the codes in a slot
_SWEPT_FRAMES = 64  # frames per call in the sweep over all codes
_SWEPT_BYTES = 4e9  # GPU memory for each stream in a sweep call, up to _SWEPT_AT_ONCE; float32 uses a quarter of it
_SWEPT_AT_ONCE = 4
# Memory for captured calls per frame of the largest one, and memory for convolutions and the allocator. Both were
# measured with 8, 128 and 256 streams.
_CALL_FRAME_BYTES = 5_700_000
_MORE_BYTES = 600 << 20


@dataclass(frozen=True, slots=True)
class Precision:
    """Number format of products and activations on a GPU, and Triton's method for float32 products."""

    name: str
    dtype: torch.dtype
    products: str = "tf32"


# Fastest first. bfloat16 has fewer digits than float16, but does not overflow. The last entry is always exact enough.
PRECISIONS = (
    Precision("float16", torch.float16),
    Precision("bfloat16", torch.bfloat16),
    Precision("tf32", torch.float32),
    Precision("float32", torch.float32, "tf32x3"),
)


class CallShape(NamedTuple):
    """Shape for which a call is captured: number of streams, including padding, and frames per stream."""

    batch: int
    frames: int


@dataclass(slots=True, eq=False)
class _SlotStream:
    """Progress of the stream in a slot."""

    slot: int
    called: int = 0  # frames in launched calls
    float32: DecoderState | None = None  # state from which a stream continues in float32 after NaN or infinity


class TritonSlots(SlotDecoder):
    """Decoder slots with captured calls on a separate CUDA stream.

    `capture` captures `TritonDecoder.decode` as a graph for each `CallShape` before the first stream starts. `decode`
    replays the graph for a call's shape and returns a `_GpuCall` with the call's buffers on the host.

    `write` makes the CUDA stream wait for the work queued on the current stream, so a frame is decoded as soon as its
    codes are available.
    """

    def __init__(
        self,
        folded: FoldedWeights,
        *,
        num_slots: int,
        device: torch.device,
        precision: Precision,
        load_float32: Callable[[], CodecDecoder],
        batches: Sequence[int] | None = None,
    ) -> None:
        """Create slots whose calls are captured for batches of `batches` streams.

        `load_float32` loads the decoder for streams that reached NaN or infinity.
        """
        from deployments.codec.backends.triton_decoder import TritonDecoder  # Triton is only installed with a GPU

        self.decoder = TritonDecoder(
            folded,
            num_slots=num_slots,
            code_ring=CODE_RING,
            device=device,
            dtype=precision.dtype,
            products=precision.products,
        )
        self.num_slots = num_slots
        self.precision = precision.name
        self.reach = folded.config.reach
        self._repaired = 0
        self._call_frames = call_frames(within_reach(device))
        self._load_float32 = load_float32
        self._streams = [_SlotStream(slot) for slot in range(num_slots)]
        self.batches = sorted(batches) if batches is not None else buckets(num_slots, BATCHES)
        self.cuda_stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._graphs = Graphs(self.cuda_stream)
        self._inputs: dict[CallShape, Tensor] = {}  # slot numbers read by a captured call
        self._outputs: dict[CallShape, tuple[Tensor, Tensor]] = {}  # a captured call's samples and broken streams
        self._recalled = self._padding(1)  # slot number read by captured recalls
        self._free_calls: list[_GpuCall] = []
        self._columns = 2 + self.decoder.config.num_quantizers
        width = max(num_slots, CODE_RING) * self._columns * 2  # columns hold 64 bits, staging rows hold 32
        self._staging = Staging(width, device=device, rows=_STAGED_WRITES)

    @classmethod
    def load(
        cls, directory: Path, backend: type[Backend], *, num_slots: int, device: torch.device, precompile: Precompile,
        report: Callable[[str], None],
    ) -> "TritonSlots":  # fmt: skip
        """Load with the first of PRECISIONS that is close enough to float32 on this checkpoint."""
        folded = FoldedWeights.load(directory, device=device)

        def load_float32() -> CodecDecoder:
            return CodecDecoder(backend.load(directory, device=device))

        slots = fitting_slots(
            CodecDecoder(backend(folded)),
            lambda kind: cls(folded, num_slots=num_slots, device=device, precision=kind, load_float32=load_float32),
            precompile=precompile,
            report=report,
        )
        slots.capture()
        return slots

    @staticmethod
    def gpu_bytes(config: DecoderConfig, *, num_weights: int, num_slots: int, within_reach: int) -> int:
        """Return the bytes that a decoder needs in float16."""
        calls = min(call_frames(within_reach), num_slots * MAX_FRAMES) * _CALL_FRAME_BYTES
        slots = (num_slots + 1) * TritonSlots.state_bytes(config)
        return num_weights * torch.float16.itemsize + slots + calls + _MORE_BYTES

    @staticmethod
    def state_bytes(config: DecoderConfig) -> int:
        values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.cached_frames * config.head_dim
        return values * torch.float16.itemsize

    @property
    def repaired(self) -> int:
        return self._repaired

    @torch.inference_mode()
    def capture(self) -> None:
        torch.cuda.synchronize()  # weights and slots were filled on another CUDA stream
        with torch.cuda.stream(self.cuda_stream):
            for shape in self._shapes():
                slots = self._padding(shape.batch)
                made = self._graphs.capture(shape, partial(self.decoder.decode, slots, shape.frames))
                self._inputs[shape], self._outputs[shape] = slots, made
            for frames in GPU_RAMP:
                self._graphs.capture(("recall", frames), partial(self.decoder.recall, self._recalled, frames))
        self.cuda_stream.synchronize()

    @torch.inference_mode()
    def run_all_shapes(self) -> None:
        """Run each call shape once without capture."""
        with torch.cuda.stream(self.cuda_stream):
            for shape in self._shapes():
                self.decoder.decode(self._padding(shape.batch), shape.frames)

    def _padding(self, batch: int) -> Tensor:
        return torch.full((batch,), self.decoder.scratch_slot, device=self.decoder.device, dtype=torch.int32)

    def _shapes(self) -> Iterator[CallShape]:
        """Yield all pairs of batch bucket and GPU_RAMP entry. The largest is first, because all share its memory."""
        for frames in reversed(GPU_RAMP):
            for batch in reversed([size for size in self.batches if size <= self.largest_batch(frames)]):
                yield CallShape(batch, frames)

    @torch.inference_mode()
    def snr_db(self, every: Tensor, audio: Tensor) -> float:
        """Return the signal-to-error ratio for codes [streams, frames, groups] decoded here, without capture.

        `audio` is the reference, int16 [streams, samples]. Returns minus infinity if samples are not finite.
        """
        frames = every.shape[1]
        sizes = split_frames(frames, call_sizes(GPU_RAMP))
        batch, pieces = self.largest_batch(max(sizes)), []
        for streams in torch.split(every.to(torch.int16), batch):
            for slot, codes in enumerate(streams):
                self.start_slot(slot)
                self.write([slot] * frames, range(frames), codes)
            with torch.cuda.stream(self.cuda_stream):
                slots = self._padding(batch)
                slots[: len(streams)] = torch.arange(len(streams))
                pcm, broken = zip(*(self.decoder.decode(slots, size) for size in sizes), strict=True)
                if bool(torch.stack(broken)[:, : len(streams)].any()):
                    return -inf
                pieces.append(torch.cat(pcm, dim=1)[: len(streams)].cpu())
        return snr_db(audio, torch.cat(pieces))

    def largest_batch(self, frames: int) -> int:
        return max(size for size in self.batches if size * frames <= self._call_frames)

    @torch.inference_mode()
    def start_slot(self, slot: int, state: DecoderState | None = None) -> None:
        self._streams[slot] = _SlotStream(slot, called=0 if state is None else state.position)
        with torch.cuda.stream(self.cuda_stream):
            if state is None:
                self.decoder.reset(slot)
            else:
                self.decoder.resume(slot, state)

    @torch.inference_mode()
    def state(self, slot: int) -> DecoderState:
        with torch.cuda.stream(self.cuda_stream):
            return self.decoder.state(slot, self._streams[slot].called)

    @torch.inference_mode()
    def write(self, slots: Sequence[int], positions: Sequence[int], codes: Tensor) -> None:
        """Enqueue a write of `codes`, which the current CUDA stream may still be computing."""
        self.cuda_stream.wait_stream(torch.cuda.current_stream())
        if codes.is_cuda:
            codes.record_stream(self.cuda_stream)
        with torch.cuda.stream(self.cuda_stream):
            sent = self._sent(slots, [position % CODE_RING for position in positions], codes)
            frames = codes if codes.is_cuda else sent[:, 2:]
            self.decoder.codes[sent[:, 0], sent[:, 1]] = frames.to(torch.int16)

    def _sent(self, slots: Sequence[int], positions: Sequence[int], codes: Tensor) -> Tensor:
        """Copy to the GPU: [rows, 2 + groups] int64 with slot, position, and the codes if they are on the host."""
        staged, shape = self._staging.next_row(), (len(slots), self._columns)
        rows = staged.values.view(np.int64)[: len(slots) * self._columns].reshape(shape)
        rows[:, 0], rows[:, 1] = slots, positions
        if not codes.is_cuda:
            rows[:, 2:] = codes.numpy()
        return staged.tensor.view(torch.int64)[: rows.size].view(shape).to(self.decoder.device, non_blocking=True)

    @torch.inference_mode()
    def recall(self, slot: int, frames: int) -> None:
        """Launch calls without waiting. The convolutions run for the last frames only, which fill their memory."""
        left = frames
        with torch.cuda.stream(self.cuda_stream):
            self._recalled.fill_(slot)
            for size in recall_sizes(frames, call_sizes(GPU_RAMP)):
                left -= size
                if left >= self.decoder.config.convolved_frames:
                    self._graphs.replay(("recall", size))
                else:
                    self._inputs[CallShape(1, size)].fill_(slot)
                    self._graphs.replay(CallShape(1, size))
        self._streams[slot].called += frames

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], frames: int) -> DecodeCall:
        """Launch the call and return without waiting for it."""
        shape = CallShape(next(size for size in self.batches if size >= len(slots)), frames)
        call = self._free_calls.pop() if self._free_calls else _GpuCall(self)
        padded = [*slots, *[self.decoder.scratch_slot] * (shape.batch - len(slots))]
        streams = [self._streams[slot] for slot in slots]
        with torch.cuda.stream(self.cuda_stream):
            self._inputs[shape].copy_(call.fill_slots(padded), non_blocking=True)
            self._graphs.replay(shape)
            call.fetch(self._outputs[shape], streams, frames)
        for stream in streams:
            stream.called += frames
        return call

    def barrier(self) -> None:
        torch.cuda.current_stream().wait_stream(self.cuda_stream)

    @torch.inference_mode()
    def decode_again(self, stream: _SlotStream, position: int, frames: int) -> Pcm | EngineError:
        """Decode `frames` frames at `position` in float32. Computes the state before them from the stream's codes."""
        with torch.cuda.stream(self.cuda_stream):
            try:
                if stream.float32 is None:
                    self._repaired += 1
                    stream.float32 = self._float32.state_after(self._written(stream, position - self.reach, position))
                codes = self._written(stream, position, position + frames)
                audio, (stream.float32,) = self._float32.decode(codes[None], [stream.float32])
            except torch.OutOfMemoryError:
                return EngineError("the audio reached NaN or infinity, and the GPU lacks memory to use float32")
            except EngineError as error:
                return error
            return to_pcm16(audio[0])

    @cached_property
    def _float32(self) -> CodecDecoder:
        return self._load_float32()

    def _written(self, stream: _SlotStream, begin: int, end: int) -> Tensor:
        """Return codes [frames, groups] of a stream's frames `begin` to `end`, excluding negative frame numbers."""
        numbers = torch.arange(max(0, begin), end, device=self.decoder.device)
        return self.decoder.codes[stream.slot, numbers % CODE_RING].long()

    def release(self, call: "_GpuCall") -> None:
        """Return the buffers of a finished call to the pool of free calls."""
        self._free_calls.append(call)


class _GpuCall(DecodeCall):
    """Buffers of a launched call in pinned memory: the slots that it reads, and its results."""

    def __init__(self, owner: TritonSlots) -> None:
        self._owner = owner
        samples = MAX_CALL_FRAMES * owner.decoder.frame_samples
        self._pcm = torch.empty(samples, dtype=torch.int16, pin_memory=True)
        self._slots, self._broken = torch.empty((2, owner.batches[-1]), dtype=torch.int32, pin_memory=True)
        self._rows: list[tuple[_SlotStream, int]] = []  # each stream with its position before the call
        self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._samples = self._frames = 0  # per stream

    def fill_slots(self, slots: list[int]) -> Tensor:
        """Copy `slots` to pinned memory and return the tensor."""
        host: Tensor = self._slots[: len(slots)]
        host.copy_(torch.tensor(slots, dtype=torch.int32))
        return host

    def fetch(self, outputs: tuple[Tensor, Tensor], streams: list[_SlotStream], frames: int) -> None:
        """Enqueue the copy of a call's outputs to the host. The rows after those of `streams` are padding."""
        pcm, broken = outputs
        count = len(streams)
        self._frames = frames
        self._samples = pcm.shape[1]
        self._rows = [(stream, stream.called) for stream in streams]
        self._view().copy_(pcm[:count], non_blocking=True)
        self._broken[:count].copy_(broken[:count], non_blocking=True)
        self._landed.record()

    @property
    def done(self) -> bool:
        return bool(self._landed.query())  # type: ignore[no-untyped-call]

    def result(self) -> list[Pcm | EngineError]:
        self._landed.synchronize()
        pcm: list[Pcm | EngineError] = list(self._view().numpy().copy())
        rows, broken, frames = self._rows, self._broken.tolist(), self._frames
        self._owner.release(self)
        for row, (stream, position) in enumerate(rows):
            if broken[row] or stream.float32 is not None:
                pcm[row] = self._owner.decode_again(stream, position, frames)
        return pcm

    def _view(self) -> Tensor:
        count = len(self._rows)
        return self._pcm[: count * self._samples].view(count, self._samples)


def within_reach(device: torch.device) -> int:
    """Return the bytes of GPU memory that this process has allocated or could allocate."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def fitting_slots(
    exact: CodecDecoder,
    make: Callable[[Precision], TritonSlots],
    *,
    precompile: Precompile,
    report: Callable[[str], None],
) -> TritonSlots:
    """Return `make` for the first of PRECISIONS that matches `exact` on each code, or for the last if none matches."""
    every = every_code(exact.config)
    at_once = _SWEPT_AT_ONCE
    if exact.device.type == "cuda":
        at_once = max(1, min(at_once, int(within_reach(exact.device) / _SWEPT_BYTES)))
    audio = torch.cat([_audio(exact, codes) for codes in torch.split(every, at_once)])
    torch.cuda.empty_cache()  # otherwise weights and slots would reuse this memory and keep it from the engine
    ratio_db, failed = 0.0, ""
    for precision in PRECISIONS:
        if precision.dtype is torch.bfloat16 and ratio_db > -inf:
            continue  # float16 did not overflow and has more digits
        slots = make(precision)
        precompile(slots.run_all_shapes)
        ratio_db = slots.snr_db(every, audio)
        if ratio_db >= MIN_SNR_DB or precision is PRECISIONS[-1]:
            break
        failed += f", {precision.name} {ratio_db:.1f} dB"
    report(describe_choice(slots.precision, ratio_db, failed))
    return slots


def every_code(config: DecoderConfig) -> Tensor:
    """Return codes [streams, frames, groups] in which each code occurs once per codebook, plus one random stream."""
    frames = min(_SWEPT_FRAMES, config.codebook_size)
    groups = torch.arange(config.num_quantizers)
    count = -(-config.codebook_size // frames) * frames
    # The factor makes the codes within each frame differ.
    codes = (torch.arange(count)[:, None] + 131 * groups) % config.codebook_size
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(config.codebook_size, (frames, config.num_quantizers), generator=generator)
    return torch.cat((codes, random)).view(-1, frames, config.num_quantizers)


def _audio(exact: CodecDecoder, codes: Tensor) -> Tensor:
    """Decode to int16 [streams, samples]. Returns silence after NaN or infinity, which matches no result."""
    try:
        return torch.from_numpy(to_pcm16(exact.decode(codes, [exact.initial_state()] * len(codes))[0]))
    except EngineError:
        return torch.zeros(len(codes), codes.shape[1] * exact.frame_samples, dtype=torch.int16)
