"""What a GPU in production does: bfloat16, fused kernels, captured steps of every size, sequences that come and go with
their audio. Those that say nothing of batches and kernels are tried in miniature on a CPU as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.codec.decoder import MIN_SNR_DB, snr_db, to_pcm16
from deployments.config import TalkerConfig
from deployments.protocol import ALL_FRAMES, Codes, FinishReason, Sampling, SynthesisRequest
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine, warm_up
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.runner.model_runner import ModelRunner
from deployments.talker.state.kv_cache import KVCache
from deployments.talker.state.sequence import FrameLimit, Sequence
from talkray_tools.choices import Tolerance, divergences, near_ties
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.random_codec import Stress
from talkray_tools.released import SHAPES, Shape
from talkray_tools.unfolded_codec import DecoderNetwork
from tests.deployments.talker.driving import GREEDY, ask, speak, speak_all
from tests.deployments.talker.test_deterministic import WIDE

on_gpu = pytest.mark.gpu
LONG_TEXT = "A text that is a good deal longer than the other ones, so that its prompt takes several passes. " * 8
TINY = SHAPES["tiny-CustomVoice"]
TWINS = Tolerance(
    0.2, 1.0
)  # every code of stressed weights has a twin 1e-3 beside it, which bfloat16 cannot tell apart


@dataclass(frozen=True, slots=True)
class Place:
    device: str
    shape: Shape  # with a codec that the device's kernels take

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32


PLACES = [
    pytest.param(Place("cuda", replace(WIDE, codec=SHAPES["1.7B-CustomVoice"].codec)), marks=on_gpu, id="gpu"),
    pytest.param(Place("cpu", TINY), id="cpu"),
]
needs_gpu = pytest.mark.parametrize("place", PLACES[:1], indirect=True, scope="module")


def checkpoint_of(place: Place, folder: Path, stress: Stress | None = None) -> Path:
    dtype = torch.float32 if stress is None else torch.bfloat16
    write_checkpoint(folder, place.shape, Options(seed=3, dtype=dtype, codec_dtype=dtype, stress=stress))
    return folder


def load(
    checkpoint: Path, place: Place, *, streams: int, num_blocks: int = 2000, deterministic: bool = False,
    captured: bool = True, plain: bool = False,
) -> Engine:  # fmt: skip
    """An engine as production has it; not `captured`, it runs operation by operation. With `plain` networks a CPU
    packs prompts as a GPU does.
    """
    block_size = 64 if place.device == "cuda" else 16
    per_position = KVCache.bytes_per_position(ModelConfig.load(checkpoint).talker, place.dtype)
    config = TalkerConfig(
        device=place.device,  # type: ignore[arg-type]
        max_num_seqs=streams,
        max_num_waiting=256,
        max_model_len=1024,
        kernels="plain" if plain and place.device == "cpu" else "auto",
        deterministic=deterministic and place.device == "cuda",
        kv_cache_bytes=num_blocks * block_size * per_position,
    )
    engine = build_engine(checkpoint, config)
    if place.device == "cuda":
        assert "fused" in engine.runner.networks.name
        if captured:
            warm_up(engine)
    return engine


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    return found


@pytest.fixture(scope="module")
def checkpoint(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return checkpoint_of(place, tmp_path_factory.mktemp("production") / "checkpoint")


@dataclass(slots=True)
class Stream:
    codes: list[Codes] = field(default_factory=list)
    pcm: bytearray = field(default_factory=bytearray)
    reason: FinishReason | None = None


@dataclass(slots=True)
class Observed:
    buckets: set[int] = field(default_factory=set)  # sizes of steps
    rows: dict[int, set[int]] = field(default_factory=dict)  # of the state, and whose they were
    preempted: int = 0  # sequences that had frames


def observe(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Observed:
    seen, queue_step, preempt = Observed(), engine.runner.queue_step, engine.scheduler._preempt

    def queueing(sequences: list[Sequence], *more: object) -> object:
        seen.buckets.add(next(size for size in engine.runner.buckets if size >= len(sequences)))
        for sequence in sequences:
            assert sequence.row is not None
            seen.rows.setdefault(sequence.row, set()).add(sequence.id)
        return queue_step(sequences, *more)  # type: ignore[arg-type]

    def preempted(sequence: Sequence) -> None:
        seen.preempted += sequence.num_frames > 0
        preempt(sequence)

    monkeypatch.setattr(engine.runner, "queue_step", queueing)
    monkeypatch.setattr(engine.scheduler, "_preempt", preempted)
    return seen


def with_audio(engine: Engine, requests: list[SynthesisRequest], *, leave: dict[int, int]) -> dict[int, Stream]:
    """Requests that join two steps apart, all with audio; those in `leave` are left behind so many of their frames."""
    streams: dict[int, Stream] = {number: Stream() for number in range(len(requests))}
    left, steps, joined = set[int](), 0, 0
    while joined < len(requests) or not engine.is_idle:
        while joined < len(requests) and steps >= 2 * joined:
            engine.add(joined, replace(requests[joined], gpu_frames=ALL_FRAMES))
            joined += 1
        output = engine.step()
        assert output.failures == ()
        for number, chunk in output.chunks:
            if number in left:
                continue  # audio that was ready before
            streams[number].codes += list(chunk.codes)
            streams[number].pcm += chunk.pcm
            streams[number].reason = chunk.finish_reason
        for number, frames in leave.items():
            if number not in left and len(streams[number].codes) >= frames:
                engine.abort(number)
                left.add(number)
        steps += 1
    engine.check_integrity()
    assert left == set(leave)
    return {number: stream for number, stream in streams.items() if number not in left}


def assert_audio_is_of_codes(checkpoint: Path, place: Place, streams: dict[int, Stream]) -> None:
    network = DecoderNetwork.load(checkpoint / "speech_tokenizer", device=torch.device(place.device))
    for number, stream in streams.items():
        codes = torch.from_numpy(np.stack(stream.codes).astype(np.int64))[None].to(place.device)
        with torch.inference_mode():
            exact = torch.from_numpy(to_pcm16(network(codes))[0].copy())
        heard = torch.from_numpy(np.frombuffer(bytes(stream.pcm), np.int16).copy())
        assert heard.shape == exact.shape, f"stream {number}: samples are missing or doubled"
        assert snr_db(exact, heard) >= MIN_SNR_DB, f"stream {number}"


def coming_and_going(count: int) -> list[SynthesisRequest]:
    draw = np.random.default_rng(0)
    samplings = (Sampling(), Sampling(top_p=0.8, subtalker_top_p=0.7), GREEDY)
    return [
        ask(
            "A word or two, " * int(draw.integers(1, 9)),
            frames=int(draw.integers(6, 40)),
            seed=number,
            sampling=samplings[number % 3],
            ignore_eos=True,
        )
        for number in range(count)
    ]


def test_coming_and_going_keeps_the_audio(place: Place, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of all sizes, rows taken over from aborted streams, and little room for keys and values."""
    count = 60 if place.device == "cuda" else 9
    streams_at_once, num_blocks = (16, 30) if place.device == "cuda" else (3, 14)
    engine = load(checkpoint, place, streams=streams_at_once, num_blocks=num_blocks)
    seen = observe(engine, monkeypatch)
    leave = {1: 3, 4: 1, 7: 2}
    streams = with_audio(engine, coming_and_going(count), leave=leave)
    assert seen.preempted > 0
    assert any(leave.keys() & owners and len(owners) > 1 for owners in seen.rows.values()), "no row was taken over"
    assert [stream.reason for stream in streams.values()] == [FinishReason.LENGTH] * (count - len(leave))
    if place.device == "cuda":
        assert len(seen.buckets) >= 3
    assert_audio_is_of_codes(checkpoint, place, streams)


def test_what_is_preempted_says_the_same(place: Place, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic, as codes depend on the batch by default."""
    requests = coming_and_going(9 if place.device == "cuda" else 5)
    tight = load(checkpoint, place, streams=3, num_blocks=5 if place.device == "cuda" else 14, deterministic=True)
    seen = observe(tight, monkeypatch)
    streams = with_audio(tight, requests, leave={})
    assert seen.preempted > 0 or place.device == "cpu"
    alone = load(checkpoint, place, streams=3, deterministic=True)
    for number, request in enumerate(requests):
        np.testing.assert_array_equal(np.stack(streams[number].codes), speak(alone, request).codes, f"stream {number}")


@pytest.mark.parametrize("stress", Stress)
def test_stressed_weights_speak(place: Place, stress: Stress, tmp_path: Path) -> None:
    """Codes are those of float32 but for near-ties, the audio is that of its codes."""
    checkpoint = checkpoint_of(place, tmp_path / "checkpoint", stress)
    engine = load(checkpoint, place, streams=3)
    requests = [ask(text, frames=24, sampling=GREEDY, ignore_eos=True) for text in ("Hello there.", "Another one.")]
    streams = with_audio(engine, requests, leave={})
    assert_audio_is_of_codes(checkpoint, place, streams)
    exact = build_engine(checkpoint, TalkerConfig(device="cpu", kernels="plain", max_num_seqs=1, max_model_len=1024))
    for number, request in enumerate(requests):
        codes = np.stack(streams[number].codes)
        diverging = divergences(exact, request, codes, most=24)
        passed, detail = near_ties(diverging, codes, TWINS)
        assert passed, f"stream {number}: {detail}"


@on_gpu
@needs_gpu
def test_captured_steps_of_every_size_are_those_that_run_as_they_are(place: Place, checkpoint: Path) -> None:
    """The very bits: a recording launches the same kernels."""
    captured, plain = load(checkpoint, place, streams=128), load(checkpoint, place, streams=128, captured=False)
    before = captured.runner.graphs.num_eager
    assert captured.runner.buckets == [1, 2, 8, 16, 32, 48, 64, 96, 128]
    for size in captured.runner.buckets:
        requests = [
            ask("Hello there.", frames=6, seed=seed, sampling=Sampling(top_p=0.9 if seed % 3 else 1.0), ignore_eos=True)
            for seed in range(size)
        ]
        for one, other in zip(speak_all(captured, requests), speak_all(plain, requests), strict=True):
            np.testing.assert_array_equal(one.codes, other.codes, f"{size} streams")
    assert captured.runner.graphs.num_eager == before
    assert plain.runner.graphs.num_eager > 6 * len(captured.runner.buckets)


PROMPT_ROWS = (9, 17, 30, 63, 64, 65, 96, 127, 128, 129, 200, 257, 511, 512, 513, 900)


def prompted(engine: Engine, rows: int, number: int) -> Sequence:
    request = ask("word " * 950, seed=number, non_streaming_mode=True)
    prompt = engine.prompts.build(request)
    assert prompt.num_positions >= rows
    cut = replace(prompt, text_ids=prompt.text_ids[:rows], codec_ids=prompt.codec_ids[:rows])
    limit = FrameLimit(99, FinishReason.LENGTH)
    sequence = Sequence(number, request, cut, engine.model_config.generation, limit, row=number, frame_s=0.08)
    engine.runner.blocks.allocate(number, rows + 1)
    return sequence


@torch.inference_mode()
def hidden_of(runner: ModelRunner, sequences: list[Sequence]) -> torch.Tensor:
    """What the talker makes of prompts that are prefilled together, [sequences, hidden] float32."""
    runner.prefill(sequences)
    return runner.state.hidden[[sequence.row for sequence in sequences]].float().cpu()


def relative_errors(hidden: torch.Tensor, exact: torch.Tensor) -> list[float]:
    return ((hidden - exact).norm(dim=1) / exact.norm(dim=1)).tolist()


@pytest.fixture(scope="module")
def exact_hidden(place: Place, checkpoint: Path) -> Callable[[int], torch.Tensor]:
    """In float32, in plain PyTorch, each prompt by itself: [hidden]."""
    config = TalkerConfig(device="cpu", kernels="plain", max_num_seqs=1, max_model_len=1024)
    engine = build_engine(checkpoint, config)

    def hidden(rows: int) -> torch.Tensor:
        sequence = prompted(engine, rows, 0)
        made = hidden_of(engine.runner, [sequence])[0]
        engine.runner.blocks.free(0)
        return made

    return hidden


def tolerance(place: Place) -> float:
    """Of two layers in bfloat16; a row that sees another sequence's, or misses one of its own, is off by about 1."""
    return 0.03 if place.device == "cuda" else 1e-4


def test_prompts_are_exact(place: Place, checkpoint: Path, exact_hidden: Callable[[int], torch.Tensor]) -> None:
    """Fused kernels take the first 512 rows, plain PyTorch those behind them."""
    engine = load(checkpoint, place, streams=4, plain=True)
    before, errors = engine.runner.graphs.num_eager, {}
    for rows in PROMPT_ROWS:
        sequence = prompted(engine, rows, 0)
        [errors[rows]] = relative_errors(hidden_of(engine.runner, [sequence]), exact_hidden(rows)[None])
        engine.runner.blocks.free(0)
    assert max(errors.values()) < tolerance(place), errors
    if place.device == "cuda":
        assert engine.runner.graphs.num_eager == before


def test_prompts_do_not_mix(place: Place, checkpoint: Path, exact_hidden: Callable[[int], torch.Tensor]) -> None:
    """Which prompts share one depends on their lengths; the last row of each is compared."""
    engine, lengths = load(checkpoint, place, streams=8, plain=True), (9, 30, 17, 63, 9, 96, 30, 129)
    sequences = [prompted(engine, rows, number) for number, rows in enumerate(lengths)]
    together = hidden_of(engine.runner, sequences)
    errors = relative_errors(together, torch.stack([exact_hidden(rows) for rows in lengths]))
    assert max(errors) < tolerance(place), errors
    wrong = relative_errors(together, torch.stack([exact_hidden(rows + 1) for rows in lengths]))
    assert min(wrong) > 2 * tolerance(place), "another prompt would not be noticed"


@on_gpu
@needs_gpu
def test_programmatic_launch_changes_no_bit(place: Place, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand steps with it and without it, while delays and other work come between at random."""
    with_it = load(checkpoint, place, streams=8)
    assert with_it.runner.networks.pdl  # type: ignore[attr-defined]
    monkeypatch.setattr("deployments.talker.networks.fused_networks.is_hopper", lambda device: False)
    without_it = load(checkpoint, place, streams=8)
    assert not without_it.runner.networks.pdl  # type: ignore[attr-defined]
    draw, steps = np.random.default_rng(0), 500
    for turn in range(20):
        size = int(draw.choice([1, 2, 5, 8]))
        delays = np.where(draw.random(steps) < 0.3, draw.integers(1, 200_000, steps), 0)
        quiet = stepped(without_it, size, turn, np.zeros(steps, np.int64))
        disturbed = stepped(with_it, size, turn, delays)
        for one, other in zip(quiet, disturbed, strict=True):
            assert torch.equal(one, other), f"turn {turn}, {size} streams"


@torch.inference_mode()
def stepped(engine: Engine, size: int, seed: int, delays: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [steps, streams, groups] and the last hidden states; before each step so many clock cycles pass."""
    runner, made, beside = engine.runner, [], torch.cuda.Stream()  # type: ignore[no-untyped-call]
    noise = torch.randn((2048, 2048), device="cuda", dtype=torch.bfloat16)
    sequences = []
    for number in range(size):
        sequence = prompted(engine, 30 + number, number)
        sequence.request = replace(sequence.request, seed=1000 * seed + number, ignore_eos=True)
        runner.blocks.allocate(number, sequence.num_positions + len(delays))
        sequences.append(sequence)
    runner.prefill(sequences)
    for cycles in delays.tolist():
        if cycles:
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(beside):
                noise @ noise
        codes = runner.queue_step(sequences).result()
        made.append(torch.from_numpy(codes.copy()))
        for sequence, frame in zip(sequences, codes, strict=True):
            sequence.frames.append(frame)
    torch.cuda.synchronize()
    hidden = runner.state.hidden[[sequence.row for sequence in sequences]].clone()
    for number in range(size):
        runner.blocks.free(number)
    return torch.stack(made), hidden


@on_gpu
@needs_gpu
def test_the_lane_changes_no_bit(place: Place, checkpoint: Path) -> None:
    """First frames beside steps of others and without them, while delays come between at random."""
    engine = load(checkpoint, place, streams=24)
    runner, lane = engine.runner, engine.lanes.runners[0]
    draw = np.random.default_rng(0)
    speaking = [prompted(engine, 20 + number, number) for number in range(16)]
    coming = [prompted(engine, 9 + 7 * number, 16 + number) for number in range(8)]
    for sequence in speaking:
        runner.blocks.allocate(sequence.id, sequence.num_positions + 3)
    for turn in range(200):
        old, new = speaking[: int(draw.choice([1, 8, 16]))], coming[: int(draw.choice([1, 2, 5, 8]))]
        quiet = beside_the_lane(engine, old, new, np.zeros(6, np.int64), one_by_one=True)
        delays = np.where(draw.random(6) < 0.7, draw.integers(1, 2_000_000, 6), 0)
        disturbed = beside_the_lane(engine, old, new, delays, one_by_one=False)
        for one, other in zip(quiet, disturbed, strict=True):
            assert torch.equal(one, other), f"turn {turn}: {len(old)} streams, {len(new)} newcomers"
    assert lane.graphs.num_eager == 0


@torch.inference_mode()
def beside_the_lane(
    engine: Engine, old: list[Sequence], new: list[Sequence], delays: np.ndarray, *, one_by_one: bool
) -> list[torch.Tensor]:
    """Three steps of `old` and the first frames of `new`: codes, and what the state has of all. Before each piece of
    work so many clock cycles pass on its CUDA stream; `one_by_one` nothing runs beside another.
    """
    runner, lane, cycles = engine.runner, engine.lanes.runners[0], iter(delays.tolist())

    def piece(of: ModelRunner) -> None:
        if one_by_one:
            torch.cuda.synchronize()
        with of.on_stream():
            torch.cuda._sleep(next(cycles))  # type: ignore[no-untyped-call]

    for sequence in old:
        sequence.frames.clear()
    piece(runner)
    runner.prefill(old)
    torch.cuda.synchronize()
    codes, first = [], None
    for number in range(3):
        piece(runner)
        step = runner.queue_step(old)
        if number == 0:
            piece(lane)
            lane.prefill(new)
        if number == 1:
            piece(lane)
            first = lane.queue_step(new)
        codes.append(step.result())
        for sequence, frame in zip(old, codes[-1], strict=True):
            sequence.frames.append(frame)
    assert first is not None
    codes.append(first.result())
    torch.cuda.synchronize()
    rows = [sequence.row for sequence in (*old, *new)]
    state = runner.state.hidden[rows], runner.state.packed[rows], runner.state.seen[rows]
    return [*map(torch.from_numpy, codes), *(each.clone() for each in state)]
