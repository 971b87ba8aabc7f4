"""Streams of a decoder by slot, and calls that are under way: the same on a GPU, in captured graphs, and on a CPU."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.checkpoint import load_strict, without_values
from deployments.codec.config import SpeechTokenizerConfig
from deployments.codec.decoder import MIN_SNR_DB, CodecDecoder, DecoderNetwork, snr_db, to_pcm16
from deployments.codec.state import DecoderState
from deployments.errors import EngineError
from deployments.protocol import Codes

logger = logging.getLogger(__name__)

FRAME_SIZES = (1, 2, 4, 8, 12)  # frames that one call decodes of each stream
MAX_BATCH_FRAMES = 384  # of all streams of a call: bounds memory, and how long the next stream waits
_TRIAL_FRAMES = 8
CODE_RING = 1024  # frames whose codes a slot holds
Pcm = NDArray[np.int16]


class Flight(Protocol):
    """A decode call that may still run."""

    @property
    def done(self) -> bool:
        """Whether `land` returns at once."""
        ...

    def land(self) -> list[Pcm]:
        """Samples of each stream of the call, in its order; waits for them. To be called once."""
        ...


class SlotDecoder(Protocol):
    """A decoder that keeps the state of its streams itself."""

    num_slots: int

    def largest_batch(self, frames: int) -> int:
        """Streams that one call of `frames` takes."""
        ...

    def begin(self, slot: int) -> None:
        """Start a new stream in a slot."""
        ...

    def write(self, slots: Sequence[int], positions: Sequence[int], codes: Tensor) -> None:
        """Give each slot its frame number `position`: codes [slots, groups], on any device."""
        ...

    def decode(self, slots: Sequence[int], frames: int) -> Flight:
        """The next `frames`, one of FRAME_SIZES, of each slot, whose codes are written."""
        ...


class PlainSlots:
    """Slots over the plain decoder, for CPUs and for shapes that the kernels do not know."""

    def __init__(self, decoder: CodecDecoder, *, num_slots: int) -> None:
        self.num_slots = num_slots
        self._decoder = decoder
        self._states: dict[int, DecoderState] = {}
        self._codes: dict[int, list[Codes]] = {}  # behind the state

    def largest_batch(self, frames: int) -> int:
        """As in SlotDecoder."""
        return min(self.num_slots, max(1, MAX_BATCH_FRAMES // frames))

    def begin(self, slot: int) -> None:
        """As in SlotDecoder."""
        self._states[slot], self._codes[slot] = self._decoder.initial_state(), []

    def write(self, slots: Sequence[int], positions: Sequence[int], codes: Tensor) -> None:
        """As in SlotDecoder."""
        for slot, position, frame in zip(slots, positions, codes.cpu().numpy(), strict=True):
            assert position == self._states[slot].position + len(self._codes[slot])
            self._codes[slot].append(frame)

    def decode(self, slots: Sequence[int], frames: int) -> Flight:
        """As in SlotDecoder; the call is over when this returns."""
        codes = torch.from_numpy(np.stack([self._codes[slot][:frames] for slot in slots]).astype(np.int64))
        audio, states = self._decoder.decode(codes, [self._states[slot] for slot in slots])
        for slot, state in zip(slots, states, strict=True):
            self._states[slot] = state
            del self._codes[slot][:frames]
        return _Landed(list(to_pcm16(audio)))


class _Landed:
    done = True

    def __init__(self, pcm: list[Pcm]) -> None:
        self._pcm = pcm

    def land(self) -> list[Pcm]:
        return self._pcm


class GpuSlots:
    """Slots over captured calls on a CUDA stream of their own.

    The stream waits for what the current stream has been given when codes are written, so that a frame starts the
    moment its codes exist.
    """

    def __init__(
        self,
        network: DecoderNetwork,
        *,
        num_slots: int,
        device: torch.device,
        dtype: torch.dtype,
        batches: Sequence[int] | None = None,
    ) -> None:
        """`batches` are the sizes that calls are captured for."""
        from deployments.codec.gpu_decoder import GpuDecoder  # Triton is there only with a GPU

        self.decoder = GpuDecoder(network, num_slots=num_slots, code_ring=CODE_RING, device=device, dtype=dtype)
        self.num_slots = num_slots
        self.batches = sorted(batches) if batches is not None else batch_buckets(num_slots)
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._graphs: dict[tuple[int, int], _Captured] = {}
        self._free: list[_GpuFlight] = []
        self._staging = _Staging(max(num_slots, CODE_RING), 2 + self.decoder.config.num_quantizers)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every call there is: batch buckets times FRAME_SIZES."""
        pool = None
        torch.cuda.synchronize()  # weights and slots were filled on another stream
        with torch.cuda.stream(self.stream):
            for batch, frames in self._calls():
                captured = _Captured(self.decoder, batch, frames, pool)
                pool = captured.graph.pool()
                self._graphs[batch, frames] = captured
        self.stream.synchronize()

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Issue every call there is once, not captured."""
        with torch.cuda.stream(self.stream):
            for batch, frames in self._calls():
                slots = torch.full((batch,), self.decoder.scratch_slot, device=self.decoder.device, dtype=torch.int32)
                self.decoder.decode(slots, frames)

    def _calls(self) -> Iterator[tuple[int, int]]:
        """Batch and frames of each call; the largest first, whose memory all share."""
        for frames in reversed(FRAME_SIZES):
            for batch in reversed([size for size in self.batches if size <= self.largest_batch(frames)]):
                yield batch, frames

    @torch.inference_mode()
    def snr_db(self, exact: CodecDecoder) -> float:
        """Signal over error of some frames, not captured, against a decoder in float32."""
        config = exact.config
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(
            config.codebook_size, (1, _TRIAL_FRAMES, config.num_quantizers), generator=generator, dtype=torch.int16
        )
        self.begin(0)
        self.write([0] * _TRIAL_FRAMES, range(_TRIAL_FRAMES), codes[0])
        with torch.cuda.stream(self.stream):
            slots = torch.zeros(1, device=self.decoder.device, dtype=torch.int32)
            pcm = self.decoder.decode(slots, _TRIAL_FRAMES).cpu()
        audio, _ = exact.decode(codes.long(), [exact.initial_state()])
        return snr_db(torch.from_numpy(to_pcm16(audio)), pcm)

    def largest_batch(self, frames: int) -> int:
        """As in SlotDecoder."""
        return max(size for size in self.batches if size * frames <= MAX_BATCH_FRAMES)

    @torch.inference_mode()
    def begin(self, slot: int) -> None:
        """As in SlotDecoder."""
        with torch.cuda.stream(self.stream):
            self.decoder.reset(slot)

    @torch.inference_mode()
    def write(self, slots: Sequence[int], positions: Sequence[int], codes: Tensor) -> None:
        """As in SlotDecoder; `codes` may be what the current stream is about to compute."""
        self.stream.wait_stream(torch.cuda.current_stream())
        if codes.is_cuda:
            codes.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            places = self._staging.send(slots, [position % CODE_RING for position in positions], codes)
            if codes.is_cuda:
                codes.record_stream(self.stream)
            frames = codes if codes.is_cuda else places[:, 2:]
            self.decoder.codes[places[:, 0], places[:, 1]] = frames.to(torch.int16)

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], frames: int) -> Flight:
        """As in SlotDecoder; returns at once."""
        batch = next(size for size in self.batches if size >= len(slots))
        flight = self._free.pop() if self._free else _GpuFlight(self)
        padded = [*slots, *[self.decoder.scratch_slot] * (batch - len(slots))]
        with torch.cuda.stream(self.stream):
            flight.start(self._graphs[batch, frames], padded, len(slots))
        return flight

    def release(self, flight: "_GpuFlight") -> None:
        """Take a landed flight's pinned memory back."""
        self._free.append(flight)


class _Captured:
    """One call shape: its graph, where its slots are read and where its samples are left."""

    def __init__(self, decoder: object, batch: int, frames: int, pool: Any) -> None:
        from deployments.codec.gpu_decoder import GpuDecoder

        assert isinstance(decoder, GpuDecoder)
        self.slots = torch.full((batch,), decoder.scratch_slot, device=decoder.device, dtype=torch.int32)
        decoder.decode(self.slots, frames)  # compiles
        torch.cuda.current_stream().synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, stream=torch.cuda.current_stream()):
            self.pcm = decoder.decode(self.slots, frames)


class _GpuFlight:
    """Pinned memory of one call."""

    def __init__(self, owner: GpuSlots) -> None:
        self._owner = owner
        samples = MAX_BATCH_FRAMES * owner.decoder.frame_samples
        self._pcm = torch.empty(samples, dtype=torch.int16, pin_memory=True)
        self._slots = torch.empty(owner.batches[-1], dtype=torch.int32, pin_memory=True)
        self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._shape = (0, 0)

    def start(self, captured: _Captured, slots: list[int], count: int) -> None:
        """Enqueue the call on the current stream; the samples of the first `count` slots are wanted."""
        host = self._slots[: len(slots)]
        host.copy_(torch.tensor(slots, dtype=torch.int32))
        captured.slots.copy_(host, non_blocking=True)
        captured.graph.replay()
        self._shape = (count, captured.pcm.shape[1])
        self._view().copy_(captured.pcm[:count], non_blocking=True)
        self._landed.record()

    @property
    def done(self) -> bool:
        """As in Flight."""
        return bool(self._landed.query())  # type: ignore[no-untyped-call]

    def land(self) -> list[Pcm]:
        """As in Flight."""
        self._landed.synchronize()
        pcm = list(self._view().numpy().copy())
        self._owner.release(self)
        return pcm

    def _view(self) -> Tensor:
        count, samples = self._shape
        return self._pcm[: count * samples].view(count, samples)


class _Staging:
    """Small pinned tables that go to the GPU, in turn; one is used again only after it was read."""

    def __init__(self, rows: int, columns: int, *, count: int = 16) -> None:
        self._tables = [
            (torch.empty((rows, columns), dtype=torch.int64, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
            for _ in range(count)
        ]
        self._next = 0

    def send(self, slots: Sequence[int], positions: Sequence[int], codes: Tensor) -> Tensor:
        """[rows, 2 + groups] int64 on the GPU: slot, position, and the codes where they come from the host."""
        table, read = self._tables[self._next]
        self._next = (self._next + 1) % len(self._tables)
        read.synchronize()
        rows = table[: len(slots)]
        rows[:, 0] = torch.tensor(slots)
        rows[:, 1] = torch.tensor(positions)
        if not codes.is_cuda:
            rows[:, 2:] = codes
        sent = rows.to("cuda", non_blocking=True)
        read.record()
        return sent


def batch_buckets(largest: int) -> list[int]:
    """1, 2, 4, 8, 16, then steps of 16 up to 64, then of 32: the padding of a call stays small."""
    sizes = [1, 2, 4, 8, 16, 32, 48, 64, *range(96, max(largest, 64) + 32, 32)]
    return [size for size in sizes if size < largest] + [largest]


def load_slots(
    directory: Path,
    *,
    num_slots: int,
    device: torch.device,
    prepare: Callable[[Callable[[], None]], None] = lambda work: None,
) -> SlotDecoder:
    """A slot decoder from a checkpoint's `speech_tokenizer` folder: float32 on a CPU, on a GPU float16 or TF32.

    `prepare` is given all the work of a GPU before any of it is done: it may compile what that launches. Raises
    CheckpointError, and EngineError where neither precision is close enough to float32.
    """
    if device.type == "cpu":
        return PlainSlots(CodecDecoder.load(directory), num_slots=num_slots)
    config = SpeechTokenizerConfig.load(directory)
    if not config.decoder.suits_matrix_units:
        return PlainSlots(CodecDecoder.load(directory, device=device), num_slots=num_slots)
    with without_values():
        network = DecoderNetwork(config.decoder)
    load_strict(network, directory, prefix="decoder.", dtype=torch.float32, device=device)
    exact = CodecDecoder(network, device=device)
    for dtype in (torch.float16, torch.float32):  # float16 has more digits than bfloat16, but can overflow
        slots = GpuSlots(network, num_slots=num_slots, device=device, dtype=dtype)
        prepare(slots.rehearse)
        if (noise_db := slots.snr_db(exact)) >= MIN_SNR_DB:
            logger.info("the first frames are decoded in %s, %.1f dB above its error", dtype, noise_db)
            slots.capture()
            return slots
    raise EngineError(f"the codec decoder on the GPU is {noise_db:.1f} dB above its error, not {MIN_SNR_DB:.0f}")
