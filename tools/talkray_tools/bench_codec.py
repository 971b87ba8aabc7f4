"""Measure the codec decoder's time per call, by number of streams and frames.

    talkray bench codec --device cuda

Without a checkpoint, the benchmark uses random weights of the released shapes, which take as long as trained ones. CPU
results are single-thread CPU times. They include calls that only advance a stream's state, as happens after a failover.
GPU results come from CUDA events around replays of captured calls.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from deployments.codec.backends.registry import choose_decoders
from deployments.codec.backends.triton_slots import PRECISIONS, Precision, TritonSlots, fitting_slots
from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.codec.decoder import CodecDecoder, snr_db, to_pcm16
from deployments.codec.fold import FoldedWeights, fold, map_tensors
from deployments.codec.plan import GPU_RAMP
from deployments.errors import EngineError
from deployments.protocol import Pcm
from deployments.talker.engine.startup import precompile_nothing
from talkray_tools.arguments import CommandParser, checkpoint
from talkray_tools.random_codec import randomize_decoder
from talkray_tools.released import SHAPES
from talkray_tools.unfolded_codec import DecoderNetwork

Row = dict[str, Any]
_SMOKE_SHAPE = "tiny-CustomVoice"
_SNR_FRAMES = 27  # frames of the SNR comparison: one pass through the ramp of chunk sizes
_PATIENCE_S = 300.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print a table. `--out` also writes the rows as JSON."""
    options = _parse(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = _bench_gpu(options) if options.device == "cuda" else _bench_cpu(options)
    if options.out is not None:
        report = {"device": _device_name(options.device), "torch": torch.__version__, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _bench_cpu(options: argparse.Namespace) -> list[Row]:
    folded = _folded(options)
    codes = _codes(folded, options, _SNR_FRAMES)
    rows: list[Row] = []
    exact: Tensor | None = None
    print(f"{_device_name('cpu')}, one thread per call")
    faster = options.backend.precisions(torch.device("cpu"))
    if not options.precision and not faster:
        print("skipping bfloat16: this CPU has neither AVX512-BF16 nor AMX. --precision bfloat16 measures it anyway")
    for precision in options.precision or ("float32", *faster):
        decoder = CodecDecoder(options.backend(folded, precision))
        audio = _ramp(decoder, codes)
        exact = audio if exact is None else exact
        ratio_db = None if audio is exact else snr_db(exact, audio)
        print(f"\n{precision}" + ("" if ratio_db is None else f", SNR {ratio_db:.1f} dB"))
        print(f"{'streams':>8}{'frames':>8}{'CPU ms':>10}{'cores per stream':>18}{'no audio, ms':>14}")
        for streams in options.streams:
            for frames in options.frames:
                rows.append(_cpu_row(decoder, options, precision, streams, frames) | {"snr_db": ratio_db})
                row = rows[-1]
                silent = f"{row['silent_ms']:>14.1f}" if streams == 1 else ""
                print(
                    f"{streams:>8}{frames:>8}{row['cpu_ms']:>10.1f}{row['cores_per_stream']:>18.3f}{silent}", flush=True
                )
        for count in options.processes:
            rows.append(_processes_row(options, precision, count))
            streams = rows[-1]["realtime_streams"]
            print(f"{count} processes of 4 streams, 4 frames: {streams:.1f} streams in real time")
    return rows


def _cpu_row(decoder: CodecDecoder, options: argparse.Namespace, precision: str, streams: int, frames: int) -> Row:
    codes = _codes(decoder, options, frames, streams)
    states = [decoder.initial_state()] * streams
    for _ in range(2):
        _, states = decoder.decode(codes, states)
    cpu_ms = _thread_ms(lambda: decoder.decode(codes, states), options.repeats)
    silent_ms = _thread_ms(lambda: decoder.recall(codes, states), options.repeats) if streams == 1 else None
    audio_ms = streams * frames * options.frame_ms
    return {
        "precision": precision,
        "streams": streams,
        "frames": frames,
        "cpu_ms": cpu_ms,
        "silent_ms": silent_ms,
        "cores_per_stream": cpu_ms / audio_ms,
    }


def _thread_ms(call: Callable[[], object], repeats: int) -> float:
    times: list[float] = []
    while len(times) < repeats:
        start = time.thread_time()
        call()
        times.append((time.thread_time() - start) * 1e3)
    return statistics.median(times)


def _processes_row(options: argparse.Namespace, precision: str, processes: int) -> Row:
    """Measure how many streams single-threaded processes decode in real time. Each call decodes 4 frames of 4 streams.

    Each process creates its own weights.
    """
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(processes), context.Queue()
    started = [
        context.Process(target=_decode_alone, args=(options, precision, barrier, queue), daemon=True)
        for _ in range(processes)
    ]
    for process in started:
        process.start()
    seconds: list[float] = [queue.get(timeout=_PATIENCE_S) for _ in started]
    for process in started:
        process.join()
    audio_s = options.repeats * 16 * options.frame_ms / 1e3
    return {"precision": precision, "processes": processes, "realtime_streams": sum(audio_s / each for each in seconds)}


def _decode_alone(options: argparse.Namespace, precision: str, barrier: Any, queue: Any) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folded = _folded(options)
    decoder = CodecDecoder(options.backend(folded, precision))
    _decode_calls(decoder, options, 2)
    barrier.wait(_PATIENCE_S)
    queue.put(_decode_calls(decoder, options, options.repeats))


def _decode_calls(decoder: CodecDecoder, options: argparse.Namespace, calls: int) -> float:
    """Return how many seconds `calls` calls take, each with 4 streams and 4 frames."""
    torch.set_num_threads(1)
    codes = _codes(decoder, options, 4, 4)
    states = [decoder.initial_state()] * 4
    start = time.perf_counter()
    for _ in range(calls):
        _, states = decoder.decode(codes, states)
    return time.perf_counter() - start


def _bench_gpu(options: argparse.Namespace) -> list[Row]:
    """Measure the requested precisions, or the precision that the server selects at startup."""
    folded = _folded(options)
    exact = CodecDecoder(options.backend(folded))
    rows: list[Row] = []
    for precision in options.precision or [None]:
        start = time.perf_counter()

        def make(kind: Precision) -> TritonSlots:
            device, most = torch.device("cuda"), max(options.streams)
            return TritonSlots(
                folded,
                num_slots=most,
                device=device,
                precision=kind,
                load_float32=lambda: exact,
                batches=options.streams,
            )

        if precision is None:
            slots = fitting_slots(
                CodecDecoder(options.backend(map_tensors(folded, Tensor.cuda))),
                make,
                precompile=precompile_nothing,
                report=print,
            )
        else:
            slots = make(next(kind for kind in PRECISIONS if kind.name == precision))
        slots.capture()
        capture_s = time.perf_counter() - start
        ratio_db = _gpu_snr_db(slots, exact, _codes(exact, options, _SNR_FRAMES))
        first_ms = _first_frame_ms(slots, options)
        memory = torch.cuda.memory_allocated() / 1e9
        print(f"{_device_name('cuda')}, {slots.precision}: SNR {ratio_db:.1f} dB")
        print(f"codes to PCM on the host {first_ms:.2f} ms, captured in {capture_s:.1f} s, {memory:.2f} GB allocated")
        print(f"{'streams':>8}{'frames':>8}{'ms':>10}{'us a frame':>12}")
        for frames in GPU_RAMP:
            for streams in options.streams:
                if streams <= slots.largest_batch(frames):
                    ms = _gpu_ms(slots, streams, frames, options.repeats)
                    print(f"{streams:>8}{frames:>8}{ms:>10.3f}{ms / streams / frames * 1e3:>12.1f}", flush=True)
                    row: Row = {"precision": slots.precision, "streams": streams, "frames": frames}
                    row |= {"ms": ms, "snr_db": ratio_db, "first_frame_ms": first_ms, "capture_s": capture_s}
                    rows.append(row)
    return rows


def _gpu_snr_db(slots: TritonSlots, exact: CodecDecoder, codes: Tensor) -> float:
    """Return the SNR in dB of int16 GPU samples against float32 CPU samples, both streamed in growing chunks."""
    wanted = torch.from_numpy(to_pcm16(_ramp(exact, codes))).double()[0]
    slots.start_slot(0)
    frames = codes.shape[1]
    slots.write([0] * frames, range(frames), codes[0].to(torch.int16))
    parts = [torch.from_numpy(pcm) for size in GPU_RAMP for pcm in slots.decode([0], size).result() if _is_audio(pcm)]
    return snr_db(wanted, torch.cat(parts).double())


def _first_frame_ms(slots: TritonSlots, options: argparse.Namespace) -> float:
    """Return the milliseconds from codes in host memory to samples in host memory, for one stream."""
    codes = _codes(slots.decoder, options, 1)[0].to(torch.int16)
    times: list[float] = []
    for _ in range(options.repeats):
        slots.start_slot(0)
        torch.cuda.synchronize()
        start = time.perf_counter()
        slots.write([0], [0], codes)
        slots.decode([0], 1).result()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _gpu_ms(slots: TritonSlots, streams: int, frames: int, repeats: int) -> float:
    """Return the device time of one call in milliseconds, averaged over consecutive calls."""
    call: Callable[[], object] = lambda: slots.decode(range(streams), frames)  # noqa: E731
    for slot in range(streams):
        slots.start_slot(slot)
    decode_calls = [call() for _ in range(3)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    slots.cuda_stream.synchronize()
    start.record(slots.cuda_stream)
    decode_calls += [call() for _ in range(repeats)]
    end.record(slots.cuda_stream)
    end.synchronize()
    for decode_call in decode_calls:
        decode_call.result()  # type: ignore[attr-defined]
    return float(start.elapsed_time(end)) / repeats


def _is_audio(pcm: Pcm | EngineError) -> TypeGuard[Pcm]:
    if isinstance(pcm, EngineError):
        raise pcm
    return True


def _folded(options: argparse.Namespace) -> FoldedWeights:
    """Load the checkpoint's decoder, or create one with random weights. Sets the backend given in `options`."""
    if options.model is not None:
        directory = options.model / "speech_tokenizer"
        config, folded = SpeechTokenizerConfig.load(directory), FoldedWeights.load(directory)
    else:
        shape = SHAPES[_SMOKE_SHAPE if options.smoke else "1.7B-CustomVoice"]
        config = SpeechTokenizerConfig.from_dict(shape.codec)
        network = DecoderNetwork(config.decoder)
        randomize_decoder(network, generator=torch.Generator().manual_seed(0))
        folded = fold(network.state_dict(), network.config)
    options.backend = choose_decoders(config, torch.device(options.device)).backend
    options.frame_ms = config.frame_samples / config.sample_rate * 1e3
    return folded


def _codes(decoder: Any, options: argparse.Namespace, frames: int, streams: int = 1) -> Tensor:
    config = decoder.config
    return torch.randint(config.codebook_size, (streams, frames, config.num_quantizers))


def _ramp(decoder: CodecDecoder, codes: Tensor) -> Tensor:
    """Decode one stream in growing chunks and return its samples."""
    states, parts, start = [decoder.initial_state()], [], 0
    for size in GPU_RAMP:
        audio, states = decoder.decode(codes[:, start : start + size], states)
        parts.append(audio)
        start += size
    return torch.cat(parts, dim=1)


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    amx = any("amx_bf16" in line for line in lines if line.startswith("flags"))
    return name + (" with AMX" if amx else "")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="talkray bench codec", description="Measure the codec decoder.")
    parser.add_argument(
        "--model", type=checkpoint, help="checkpoint directory, released name, or embedded; default: random"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device")
    parser.add_argument("--precision", nargs="+", help="default: those that the device supports")
    parser.add_argument("--streams", type=int, nargs="+", help="streams per call")
    parser.add_argument("--frames", type=int, nargs="+", default=[1, 4, 12], help="frames per stream and call (CPU)")
    parser.add_argument("--processes", type=int, nargs="*", default=[], help="also measure this many processes (CPU)")
    parser.add_argument("--repeats", type=int, default=10, help="calls per measurement")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="test run with tiny weights")
    options = parser.parse_args(arguments)
    gpu = options.device == "cuda"
    options.streams = options.streams or ([1, 2, 4, 8, 16, 32, 64, 96] if gpu else [1, 4])
    if options.smoke:
        options.repeats, options.streams, options.frames = 1, options.streams[:1], options.frames[:1]
    return options


if __name__ == "__main__":
    main()
