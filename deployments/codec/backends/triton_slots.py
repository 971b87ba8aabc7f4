"""Slots over captured calls of Triton kernels, for a GPU."""

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
from deployments.codec.plan import GPU_RAMP, call_sizes, parts
from deployments.codec.slots import CODE_RING, DecodeCall, Prepare, SlotDecoder
from deployments.errors import EngineError
from deployments.gpu.graphs import Graphs, Staging, buckets
from deployments.protocol import Pcm

# Numbers of streams in a call. They are close together, so that the padding of a call stays small.
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, *range(96, 4096, 32))
_STAGED_WRITES = 16  # each may hold all codes of a slot
_SWEPT_FRAMES = 64  # frames of one call that holds many codes
_SWEPT_BYTES = 4e9  # of a GPU for each stream of such a call, up to _SWEPT_AT_ONCE: float32 takes a quarter of it
_SWEPT_AT_ONCE = 4
# Memory of captured calls for each frame of the largest one, and memory of convolutions and of the allocator. Both were
# measured with 8, 128 and 256 streams.
_CALL_FRAME_BYTES = 5_700_000
_MORE_BYTES = 600 << 20


@dataclass(frozen=True, slots=True)
class Precision:
    """How a GPU computes: the type of products and activations, and how Triton multiplies float32."""

    name: str
    dtype: torch.dtype
    products: str = "tf32"


# The fastest first. Bfloat16 has fewer digits than float16, but does not overflow. The last one is always exact enough.
PRECISIONS = (
    Precision("float16", torch.float16),
    Precision("bfloat16", torch.bfloat16),
    Precision("tf32", torch.float32),
    Precision("float32", torch.float32, "tf32x3"),
)


class CallShape(NamedTuple):
    """The shape for which a call is captured: its streams, including padding, and the frames of each."""

    batch: int
    frames: int


@dataclass(slots=True, eq=False)
class _SlotStream:
    """Frames that a slot has decoded since its stream began."""

    slot: int
    called: int = 0  # frames in launched calls
    float32: DecoderState | None = None  # the stream reached NaN or infinity, and continues in float32 from this state


class TritonSlots(SlotDecoder):
    """Slots over captured calls on a CUDA stream of their own.

    `capture` makes a graph of `TritonDecoder.decode` for each `CallShape` before any stream opens. `decode` launches a
    call: it replays the graph of the call's shape. The `_GpuCall` that it returns has the call's buffers on the host.

    When codes are written the CUDA stream waits for the work queued on the current stream, so that a frame starts the
    moment its codes exist.
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
        """`batches` are the sizes that calls are captured for.

        `load_float32` loads the float32 decoder with which a stream continues after NaN or infinity.
        """
        from deployments.codec.backends.triton_decoder import TritonDecoder  # Triton is available only with a GPU

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
        self._inputs: dict[CallShape, Tensor] = {}  # slots that a captured call reads
        self._outputs: dict[CallShape, tuple[Tensor, Tensor]] = {}  # samples it writes, and which streams are broken
        self._free_calls: list[_GpuCall] = []
        self._columns = 2 + self.decoder.config.num_quantizers
        width = max(num_slots, CODE_RING) * self._columns * 2  # columns have 64 bits, staging has 32
        self._staging = Staging(width, device=device, rows=_STAGED_WRITES)

    @classmethod
    def load(
        cls, directory: Path, backend: type[Backend], *, num_slots: int, device: torch.device, prepare: Prepare,
        report: Callable[[str], None],
    ) -> "TritonSlots":  # fmt: skip
        """Load in the first of PRECISIONS that is close enough to float32 on this checkpoint."""
        folded = FoldedWeights.load(directory, device=device)

        def load_float32() -> CodecDecoder:
            return CodecDecoder(backend.load(directory, device=device))

        slots = fitting_slots(
            CodecDecoder(backend(folded)),
            lambda kind: cls(folded, num_slots=num_slots, device=device, precision=kind, load_float32=load_float32),
            prepare=prepare,
            report=report,
        )
        slots.capture()
        return slots

    @staticmethod
    def gpu_bytes(config: DecoderConfig, *, num_weights: int, num_slots: int, within_reach: int) -> int:
        """Bytes of a decoder in float16."""
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
        torch.cuda.synchronize()  # weights and slots were filled on another stream
        with torch.cuda.stream(self.cuda_stream):
            for shape in self._shapes():
                slots = self._padding(shape.batch)
                made = self._graphs.capture(shape, partial(self.decoder.decode, slots, shape.frames))
                self._inputs[shape], self._outputs[shape] = slots, made
        self.cuda_stream.synchronize()

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run a call of every shape once, not captured."""
        with torch.cuda.stream(self.cuda_stream):
            for shape in self._shapes():
                self.decoder.decode(self._padding(shape.batch), shape.frames)

    def _padding(self, batch: int) -> Tensor:
        return torch.full((batch,), self.decoder.scratch_slot, device=self.decoder.device, dtype=torch.int32)

    def _shapes(self) -> Iterator[CallShape]:
        """Batch buckets times GPU_RAMP; the largest first, because all share its memory."""
        for frames in reversed(GPU_RAMP):
            for batch in reversed([size for size in self.batches if size <= self.largest_batch(frames)]):
                yield CallShape(batch, frames)

    @torch.inference_mode()
    def snr_db(self, every: Tensor, audio: Tensor) -> float:
        """Signal over error of codes [streams, frames, groups], not captured, against `audio`: int16 [streams,
        samples]; minus infinity where the samples are not finite.
        """
        frames = every.shape[1]
        sizes = parts(frames, call_sizes(GPU_RAMP))
        batch, pieces = self.largest_batch(max(sizes)), []
        for streams in torch.split(every.to(torch.int16), batch):
            for slot, codes in enumerate(streams):
                self.begin(slot)
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
    def begin(self, slot: int, state: DecoderState | None = None) -> None:
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
        """The current CUDA stream may not have computed `codes` yet."""
        self.cuda_stream.wait_stream(torch.cuda.current_stream())
        if codes.is_cuda:
            codes.record_stream(self.cuda_stream)
        with torch.cuda.stream(self.cuda_stream):
            sent = self._sent(slots, [position % CODE_RING for position in positions], codes)
            frames = codes if codes.is_cuda else sent[:, 2:]
            self.decoder.codes[sent[:, 0], sent[:, 1]] = frames.to(torch.int16)

    def _sent(self, slots: Sequence[int], positions: Sequence[int], codes: Tensor) -> Tensor:
        """[rows, 2 + groups] int64 on the GPU: slot, position, and the codes if they come from the host."""
        staged, shape = self._staging.next_row(), (len(slots), self._columns)
        rows = staged.values.view(np.int64)[: len(slots) * self._columns].reshape(shape)
        rows[:, 0], rows[:, 1] = slots, positions
        if not codes.is_cuda:
            rows[:, 2:] = codes.numpy()
        return staged.tensor.view(torch.int64)[: rows.size].view(shape).to(self.decoder.device, non_blocking=True)

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], frames: int) -> DecodeCall:
        """Launch the call, and return at once."""
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
        """Samples of `frames` at `position` in float32; the state before them comes from the stream's codes."""
        with torch.cuda.stream(self.cuda_stream):
            try:
                if stream.float32 is None:
                    self._repaired += 1
                    stream.float32 = self._float32.state_after(self._written(stream, position - self.reach, position))
                codes = self._written(stream, position, position + frames)
                audio, (stream.float32,) = self._float32.decode(codes[None], [stream.float32])
            except torch.OutOfMemoryError:
                return EngineError("the audio came to NaN or infinity, and the GPU has no memory to make it in float32")
            except EngineError as error:
                return error
            return to_pcm16(audio[0])

    @cached_property
    def _float32(self) -> CodecDecoder:
        return self._load_float32()

    def _written(self, stream: _SlotStream, begin: int, end: int) -> Tensor:
        """Codes [frames, groups] of a stream's frames from `begin`, or from its first one."""
        numbers = torch.arange(max(0, begin), end, device=self.decoder.device)
        return self.decoder.codes[stream.slot, numbers % CODE_RING].long()

    def release(self, call: "_GpuCall") -> None:
        """The call's samples were read: another call may reuse its buffers."""
        self._free_calls.append(call)


class _GpuCall(DecodeCall):
    """A launched call's buffers in pinned memory: the slots that it reads, and its results."""

    def __init__(self, owner: TritonSlots) -> None:
        self._owner = owner
        samples = MAX_CALL_FRAMES * owner.decoder.frame_samples
        self._pcm = torch.empty(samples, dtype=torch.int16, pin_memory=True)
        self._slots, self._broken = torch.empty((2, owner.batches[-1]), dtype=torch.int32, pin_memory=True)
        self._rows: list[tuple[_SlotStream, int]] = []  # each stream, and its position at the call's first frame
        self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._samples = self._frames = 0  # of each stream

    def fill_slots(self, slots: list[int]) -> Tensor:
        """`slots` in pinned memory."""
        host: Tensor = self._slots[: len(slots)]
        host.copy_(torch.tensor(slots, dtype=torch.int32))
        return host

    def fetch(self, outputs: tuple[Tensor, Tensor], streams: list[_SlotStream], frames: int) -> None:
        """Enqueue the copy of a call's outputs to the host; `streams` have the first rows, the other rows pad."""
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
    """Bytes of a GPU that this process has or could get, excluding those of other processes."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def fitting_slots(
    exact: CodecDecoder, make: Callable[[Precision], TritonSlots], *, prepare: Prepare, report: Callable[[str], None]
) -> TritonSlots:
    """The result of `make` for the first of PRECISIONS that is as good as `exact` on every code, else for the last, so
    that no start fails here.
    """
    every = every_code(exact.config)
    at_once = _SWEPT_AT_ONCE
    if exact.device.type == "cuda":
        at_once = max(1, min(at_once, int(within_reach(exact.device) / _SWEPT_BYTES)))
    audio = torch.cat([_audio(exact, codes) for codes in torch.split(every, at_once)])
    torch.cuda.empty_cache()  # weights and slots in this memory would keep it from the rest of the engine
    noise_db, failed = 0.0, ""
    for precision in PRECISIONS:
        if precision.dtype is torch.bfloat16 and noise_db > -inf:
            continue  # float16 has not overflowed, and has more digits
        slots = make(precision)
        prepare(slots.rehearse)
        noise_db = slots.snr_db(every, audio)
        if noise_db >= MIN_SNR_DB or precision is PRECISIONS[-1]:
            break
        failed += f", {precision.name} {noise_db:.1f} dB"
    report(describe_choice(slots.precision, noise_db, failed))
    return slots


def every_code(config: DecoderConfig) -> Tensor:
    """[streams, frames, groups]: in all but the last stream each code occurs once in each codebook; the last one is
    random.
    """
    frames = min(_SWEPT_FRAMES, config.codebook_size)
    groups = torch.arange(config.num_quantizers)
    count = -(-config.codebook_size // frames) * frames
    # The factor lets codes of different numbers meet in a frame.
    codes = (torch.arange(count)[:, None] + 131 * groups) % config.codebook_size
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(config.codebook_size, (frames, config.num_quantizers), generator=generator)
    return torch.cat((codes, random)).view(-1, frames, config.num_quantizers)


def _audio(exact: CodecDecoder, codes: Tensor) -> Tensor:
    """int16 [streams, samples]; silence if float32 reaches NaN or infinity, because no result is close to silence."""
    try:
        return torch.from_numpy(to_pcm16(exact.decode(codes, [exact.initial_state()] * len(codes))[0]))
    except EngineError:
        return torch.zeros(len(codes), codes.shape[1] * exact.frame_samples, dtype=torch.int16)
