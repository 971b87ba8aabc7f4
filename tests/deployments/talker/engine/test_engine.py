import itertools
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deployments.config import TalkerConfig
from deployments.embedded_voice.cpu_networks import CpuNetworks
from deployments.errors import CheckpointError, EngineError, InvalidRequest
from deployments.protocol import FinishReason, FrameChunk, Reference, Sampling, SynthesisRequest
from deployments.recording_cache import Lookups
from deployments.talker.engine import engine as engine_module
from deployments.talker.engine.device import EngineDevice
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.input_processor import with_defaults
from deployments.talker.engine.startup import build_engine, warm_up
from deployments.talker.engine.step_executor import StepInFlight
from deployments.talker.model.talker import CodePredictor, Talker
from deployments.talker.networks.frame_networks import FrameNetworks
from deployments.talker.networks.plain_networks import PlainNetworks
from deployments.talker.runner.model_runner import ModelRunner, QueuedStep
from deployments.talker.state.kv_cache import KVCache
from deployments.talker.state.sequence import Sequence
from tests.deployments.talker.conftest import CONFIG
from tests.deployments.talker.driving import GREEDY, Spoken, ask, drain, resumed, speak, speak_all
from tests.deployments.talker.test_fine_tuned import made

LONG_TEXT = "A text that is a good deal longer than the other ones, so that its prompt takes several passes. " * 2
MIX = [
    ask("Hello there.", seed=1, frames=15),
    ask(LONG_TEXT, seed=2**64 - 1, frames=12, voice="vivian", language="german"),
    ask("Greedy.", frames=14, sampling=GREEDY, non_streaming_mode=False),
    ask("Instructed.", seed=4, frames=17, instructions="Speak slowly.", sampling=Sampling(top_k=0, top_p=0.8)),
    ask("Hot.", seed=5, frames=11, sampling=Sampling(temperature=1.8, subtalker_temperature=0.3), ignore_eos=True),
    ask("Half greedy.", seed=6, frames=13, voice="eric", sampling=Sampling(do_sample=False, repetition_penalty=1.3)),
    ask("Streaming text.", seed=7, frames=19, non_streaming_mode=False, sampling=Sampling(subtalker_dosample=False)),
]
Kinds = Callable[[str], Engine]


def same(one: Spoken, other: Spoken) -> bool:
    return np.array_equal(one.codes, other.codes) and one.reason is other.reason


def with_blocks(directory: Path, config: TalkerConfig, num_blocks: int) -> Engine:
    """An engine whose cache has room for so many blocks of 8 positions, the scratch block not counted."""
    bytes_per_position = KVCache.bytes_per_position(build_engine(directory, config).model_config.talker, torch.float32)
    sized = config.model_copy(update={"kv_cache_bytes": (num_blocks + 1) * 8 * bytes_per_position})
    chosen = EngineDevice(sized)
    chosen.block_size = 8
    return build_engine(directory, sized, on=chosen)


def record_prefills(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of sequences as they are prefilled; one that was preempted comes again."""
    prefilled: list[int] = []
    prefill = engine.runner.prefill

    def recording(sequences: list[Sequence]) -> None:
        prefilled.extend(sequence.id for sequence in sequences)
        prefill(sequences)

    monkeypatch.setattr(engine.runner, "prefill", recording)
    return prefilled


def push_end_of_speech(monkeypatch: pytest.MonkeyPatch, amount: float) -> None:
    """Make the end-of-speech code always the best, or always the worst."""

    def pushed(logits: Callable[[FrameNetworks, Tensor], Tensor]) -> Callable[[FrameNetworks, Tensor], Tensor]:
        def first_logits(networks: FrameNetworks, hidden: Tensor) -> Tensor:
            out = logits(networks, hidden).clone()
            out[:, networks.config.codes.eos] += amount
            return out

        return first_logits

    for kind in (PlainNetworks, CpuNetworks):
        monkeypatch.setattr(kind, "_first_logits", pushed(kind._first_logits))


@pytest.fixture(scope="module")
def alone(engine_of: Kinds) -> list[Spoken]:
    return [speak(engine_of("CustomVoice"), request) for request in MIX]


def test_the_mix_is_worth_comparing(alone: list[Spoken]) -> None:
    assert {spoken.reason for spoken in alone} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len({spoken.codes.tobytes() for spoken in alone}) == len(MIX)
    assert sorted(len(spoken.codes) for spoken in alone)[2] >= 9


@pytest.mark.parametrize(("steps_between", "order"), [(0, range(len(MIX))), (3, range(len(MIX))[::-1])])
def test_codes_are_equal_when_batched(engine: Engine, alone: list[Spoken], steps_between: int, order: range) -> None:
    """More sequences than rows: they wait, join and leave while others run."""
    together = speak_all(engine, [MIX[number] for number in order], steps_between=steps_between)
    assert [same(alone[number], spoken) for number, spoken in zip(order, together, strict=True)] == [True] * len(MIX)


@pytest.mark.parametrize("place", [0.15, 0.6, 1.0])
def test_codes_are_equal_resumed(engine: Engine, alone: list[Spoken], place: float) -> None:
    cuts = [int((len(spoken.codes) - 1) * place) for spoken in alone]
    later = [resumed(request, spoken.codes[:cut]) for request, spoken, cut in zip(MIX, alone, cuts, strict=True)]
    rests = speak_all(engine, later, steps_between=1)
    for spoken, cut, rest in zip(alone, cuts, rests, strict=True):
        assert np.array_equal(rest.codes, spoken.codes[cut:])
        assert rest.reason is spoken.reason


def test_without_kernels_every_pass_on_cpu_has_the_same_size(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How torch's matrix product rounds may depend on its number of rows, so that must not depend on the batch."""
    monkeypatch.setattr("deployments.embedded_voice.cpu_networks.fits", lambda *_: False)
    engine, rows = build_engine(checkpoint, CONFIG), set[int]()
    for network in (Talker, CodePredictor):
        forward = network.forward

        def counting(self: nn.Module, *args: Tensor, _forward: Callable[..., Tensor] = forward, **kw: object) -> Tensor:
            rows.add(len(args[0]))
            return _forward(self, *args, **kw)

        monkeypatch.setattr(network, "forward", counting)
    speak_all(engine, [ask(LONG_TEXT, frames=3), ask(frames=5), ask(frames=2)], steps_between=1)
    assert rows == {CONFIG.max_num_seqs}


def test_codes_are_equal_without_blocks(checkpoint: Path, alone: list[Spoken], monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest sequence needs every block there is: some wait for theirs, others give them up."""
    num_blocks = 28
    engine = with_blocks(checkpoint, CONFIG, num_blocks)
    prefilled = record_prefills(engine, monkeypatch)
    together = speak_all(engine, MIX, steps_between=1)
    assert [same(*pair) for pair in zip(alone, together, strict=True)] == [True] * len(MIX)
    assert engine.scheduler.blocks.num_free == num_blocks
    assert sorted(set(prefilled)) == list(range(len(MIX)))


@pytest.mark.parametrize("kind", ["Base", "VoiceDesign"])
def test_codes_are_equal_for_the_other_kinds(engine_of: Kinds, kind: str) -> None:
    engine = engine_of(kind)
    designed = [ask(text, frames=9, voice=None, instructions="Old.") for text in ("One.", LONG_TEXT)]
    requests = CLONES if kind == "Base" else designed
    whole = [speak(engine, request) for request in requests]
    together = speak_all(engine, requests, steps_between=2)
    assert [same(*pair) for pair in zip(whole, together, strict=True)] == [True] * len(requests)
    for request, spoken in zip(requests, whole, strict=True):
        rest = speak(engine, resumed(request, spoken.codes[:4]))
        assert np.array_equal(rest.codes, spoken.codes[4:])
    assert len({spoken.codes.tobytes() for spoken in whole}) == len(requests)


def clone(text: str, *, in_context: bool, non_streaming_mode: bool = False) -> SynthesisRequest:
    rng = np.random.default_rng(len(text))
    reference = Reference(rng.uniform(-0.5, 0.5, 9600).astype(np.float32), "Said.", x_vector_only=not in_context)
    request = ask(text, frames=9, voice=None, reference=reference, non_streaming_mode=non_streaming_mode)
    codes = rng.integers(0, 2048, (5, 16)).astype(np.int16)
    return replace(request, reference_codes=codes if in_context else None)


def by_prompt(engine: Engine, request: SynthesisRequest) -> SynthesisRequest:
    """`request` without samples and codes, as the answer of an engine that got them allows to ask for it."""
    engine.add(0, request)
    prompts = []
    while not engine.is_idle:
        prompts += [chunk.clone_prompt for _, chunk in engine.step().chunks]
    prompt, *others = prompts
    assert prompt is not None
    assert others == [None] * len(others)
    assert request.reference is not None
    reference = replace(request.reference, audio=None, prompt=prompt)
    return replace(request, reference=reference, reference_codes=None, gpu_frames=0)


@pytest.mark.parametrize("number", range(3))
def test_a_prompt_serves_another_engine(engine_of: Kinds, tiny_checkpoint: Callable[[str], Path], number: int) -> None:
    request, other = CLONES[number], build_engine(tiny_checkpoint("Base"), CONFIG)
    lean = by_prompt(engine_of("Base"), request)
    spoken = speak(other, lean)
    assert same(spoken, speak(engine_of("Base"), request))
    rest = speak(other, resumed(lean, spoken.codes[:4]))
    assert np.array_equal(rest.codes, spoken.codes[4:])
    other.add(0, lean)
    assert [chunk.clone_prompt for _, chunk in other.step().chunks] == [None]
    other.abort(0)
    lookups = other.prompts.speakers.take_lookups(), other.prompts.references.take_lookups()
    assert lookups == (Lookups(), Lookups())  # nothing was looked for, and nothing computed
    assert len(pickle.dumps(lean)) < 5000


def test_samples_are_not_hashed_after_the_ingress(engine_of: Kinds, monkeypatch: pytest.MonkeyPatch) -> None:
    request = pickle.loads(pickle.dumps(CLONES[1]))
    monkeypatch.setattr("hashlib.sha256", None)
    assert same(speak(engine_of("Base"), request), speak(engine_of("Base"), CLONES[1]))


CLONES = [
    clone("By voice.", in_context=False),
    clone("In context.", in_context=True),
    clone("In context, in full.", in_context=True, non_streaming_mode=True),
]


def test_the_seed_decides_what_is_drawn(engine: Engine) -> None:
    once, again, low, high = speak_all(engine, [ask(seed=seed, frames=8) for seed in (3, 3, 4, 3 + 2**40)])
    assert same(once, again)
    assert not np.array_equal(once.codes, low.codes)
    assert not np.array_equal(once.codes, high.codes)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 9])
def test_max_new_tokens_gives_a_frame_less(engine: Engine, max_new_tokens: int) -> None:
    spoken = speak(engine, ask(frames=max_new_tokens - 1, ignore_eos=True))
    assert spoken.codes.shape == (max_new_tokens - 1, engine.model_config.num_code_groups)
    assert (spoken.reason, spoken.num_text_tokens) == (FinishReason.LENGTH, len("Hello there."))


def test_speech_ends_but_not_in_its_first_two_frames(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    push_end_of_speech(monkeypatch, 1e4)
    for sampling in (GREEDY, Sampling()):
        spoken = speak(engine, ask(sampling=sampling))
        assert (len(spoken.codes), spoken.reason) == (2, FinishReason.STOP)


def test_end_of_speech_can_be_ignored(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    push_end_of_speech(monkeypatch, 1e4)
    ends, goes_on = speak_all(engine, [ask(frames=9), ask(frames=9, ignore_eos=True)])
    assert (len(ends.codes), ends.reason) == (2, FinishReason.STOP)
    assert (len(goes_on.codes), goes_on.reason) == (9, FinishReason.LENGTH)
    assert goes_on.codes.max() < engine.model_config.code_vocab_size


def test_a_runaway_is_cut_by_the_length_of_its_text(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.speech_detection._LONGEST_TOKEN_S", 0.16)
    monkeypatch.setattr("deployments.speech_detection._LEAST_S", 9 * 0.08)
    engine = build_engine(checkpoint, CONFIG)
    push_end_of_speech(monkeypatch, -1e4)
    requests = [ask("Hey", frames=90), ask("Hello you.", frames=90), ask("Hello you.", frames=20)]
    on_purpose = ask("Hello you.", frames=22, ignore_eos=True)
    ends = [(len(spoken.codes), spoken.reason) for spoken in speak_all(engine, [*requests, on_purpose])]
    runaway, length = FinishReason.RUNAWAY, FinishReason.LENGTH
    assert ends == [(9, runaway), (20, runaway), (20, length), (22, length)]


def test_a_sequence_ends_where_its_context_is_full(checkpoint: Path) -> None:
    engine = build_engine(checkpoint, CONFIG.model_copy(update={"max_model_len": 64}))
    request = ask("A somewhat longer text.", frames=500, ignore_eos=True)
    rows = engine.prompts.build(request).num_positions
    spoken = speak(engine, request)
    assert (rows + len(spoken.codes), spoken.reason) == (64, FinishReason.LENGTH)


@pytest.mark.parametrize(("num_blocks", "length"), [(8, 80), (1000, 300)])
def test_a_prompt_that_can_never_fit_is_an_invalid_request(checkpoint: Path, num_blocks: int, length: int) -> None:
    """80 letters are too long for a cache of 8 blocks only, and 300 letters for the model."""
    engine = with_blocks(checkpoint, CONFIG.model_copy(update={"max_model_len": 128}), num_blocks)
    with pytest.raises(InvalidRequest, match="shorten") as caught:
        engine.add(0, ask("a" * length))
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    assert engine.is_idle
    assert speak(engine, ask()).codes.size


def test_coming_and_leaving_disturbs_none(engine: Engine, alone: list[Spoken], monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()
    monkeypatch.setattr(QueuedStep, "has_codes", property(lambda step: next(looks) % 2 == 1))
    changes = iter((lambda: engine.add(2, MIX[2]), lambda: engine.abort(1), lambda: engine.add(3, MIX[3])))
    for number in (0, 1):
        engine.add(number, MIX[number])
    spoken: dict[int, list[FrameChunk]] = {}
    while not engine.is_idle:
        for number, chunk in engine.step(meanwhile=lambda: next(changes, lambda: None)()).chunks:
            spoken.setdefault(number, []).append(chunk)
    engine.check_integrity()
    assert len(spoken.pop(1)) == 1
    assert sorted(spoken) == [0, 2, 3]
    for number, chunks in spoken.items():
        assert same(Spoken.join(chunks), alone[number])


def test_a_frame_leaves_before_the_talker_reads_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    advance = engine.runner.networks.advance
    monkeypatch.setattr(engine.runner.networks, "advance", lambda *args, **kw: (read.append(1), advance(*args, **kw)))
    engine.add(0, MIX[0])
    assert len(engine.step().chunks) == 1
    assert not read
    engine.runner.prefill([])  # of a newcomer, who may get the row of one that has ended
    assert len(read) == 1
    for _ in range(2):
        engine.step()
    assert len(read) == 2
    engine.abort(0)
    assert engine.is_idle
    engine.step()
    assert len(read) == 2  # the stream that left does not continue


def test_a_step_that_took_long_delays_the_next_only_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a lane `advance` takes longer. The next start follows the mean then, and a quick step at once."""
    monkeypatch.setattr(engine, "_advance_ns", {})
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter_ns=lambda: 0))
    monkeypatch.setattr(engine, "_step", None)
    starts_ns, polls_s = [], [engine.poll_timeout_s]
    for measured_ns in (1_000_000, 9_000_000, 1_000_000, 900_000):
        before = SimpleNamespace(sequences=[], advance_ns=lambda measured_ns=measured_ns: measured_ns)
        runner_step: Any = SimpleNamespace(sequences=[], result=lambda: np.zeros((0, 4), np.int16))
        step = StepInFlight(runner_step, engine.runner, [], before)  # type: ignore[arg-type]
        engine._step = step
        engine._collect(step)
        starts_ns.append(step.next_start_ns + 800_000)
        polls_s.append(engine.poll_timeout_s)
    assert starts_ns == [1_000_000, 2_000_000, 1_000_000, 900_000]
    assert polls_s == [0.0, 0.0002, 0.0002, 0.0002, 0.0001]
    monkeypatch.setattr(engine, "lanes", SimpleNamespace(is_idle=False))
    assert engine.poll_timeout_s == 0.0


@pytest.mark.parametrize("kind", ["CustomVoice", "VoiceDesign", "Base"])
def test_warming_up_leaves_no_trace(tiny_checkpoint: Callable[[str], Path], kind: str) -> None:
    cold, warm = (build_engine(tiny_checkpoint(kind), CONFIG) for _ in range(2))
    warm_up(warm)
    assert warm.is_idle
    assert warm.scheduler.blocks.num_free == cold.scheduler.blocks.num_free
    warm.scheduler.check_integrity()
    request = CLONES[0] if kind == "Base" else ask(voice="ryan" if kind == "CustomVoice" else None)
    assert same(speak(warm, request), speak(cold, request))


def test_options_of_the_request_come_before_those_of_the_checkpoint() -> None:
    defaults = Sampling(do_sample=True, temperature=0.9, top_k=50, max_new_tokens=100)
    asked = Sampling(do_sample=False, top_k=0)
    assert with_defaults(asked, defaults) == Sampling(do_sample=False, temperature=0.9, top_k=0, max_new_tokens=100)


def test_the_description_is_what_the_checkpoint_says(engine_of: Kinds) -> None:
    custom, base, design = (engine_of(name).info for name in ("CustomVoice", "Base", "VoiceDesign"))
    assert {"ryan", "vivian", "eric"} < set(custom.voices)
    assert base.voices == design.voices == ()
    assert {"english", "chinese"} < set(custom.languages)
    assert "sichuan_dialect" not in custom.languages
    assert (custom.sample_rate, custom.frame_samples, custom.num_code_groups) == (24000, 1920, 16)
    assert [info.kind.value for info in (custom, base, design)] == ["custom_voice", "base", "voice_design"]


@pytest.mark.parametrize(("kind", "name"), [
    ("CustomVoice", "talker.model.layers.1.self_attn.q_norm.weight"),
    ("CustomVoice", "talker.code_predictor.lm_head.14.weight"), ("Base", "speaker_encoder.fc.bias"),
])  # fmt: skip
def test_a_lost_tensor_is_named(tiny_checkpoint: Callable[[str], Path], tmp_path: Path, kind: str, name: str) -> None:
    """Of whatever part of a talker."""

    def harmed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        assert name in tensors
        return {each: tensor for each, tensor in tensors.items() if each != name}

    with pytest.raises(CheckpointError, match=re.escape(f"{name} is missing")):
        build_engine(made(tiny_checkpoint(kind), tmp_path, harmed), CONFIG)


def test_the_number_of_blocks_follows_the_memory_set_aside(checkpoint: Path) -> None:
    assert with_blocks(checkpoint, CONFIG, 11).scheduler.blocks.num_blocks == 12
    unlimited = build_engine(checkpoint, CONFIG)
    assert unlimited.scheduler.blocks.num_blocks == CONFIG.max_num_seqs * (CONFIG.max_model_len // 16) + 1


def trip(monkeypatch: pytest.MonkeyPatch, runner: ModelRunner, which: set[int], error: Exception | None = None) -> None:
    """Prefills with one of these sequences among them raise."""
    prefill = runner.prefill

    def tripping(sequences: list[Sequence]) -> None:
        if any(sequence.id in which for sequence in sequences):
            raise error or ValueError("tripped")
        prefill(sequences)

    monkeypatch.setattr(runner, "prefill", tripping)


def test_prefills_that_all_raise_are_the_engines_fault(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(checkpoint, CONFIG)
    trip(monkeypatch, engine.runner, {1, 2, 4})
    for numbers in ([1], [2], [3], [1], [4, 5]):  # 3 and 5 are sound: those before them count no more
        for number in numbers:
            engine.add(number, ask(frames=2))
        failures: dict[int, Exception] = {}
        assert {*drain(engine, failures)} == {*numbers} - {1, 2, 4}
        assert {*failures} == {*numbers} & {1, 2, 4}
    trip(monkeypatch, engine.runner, set(range(10)))
    engine.add(20, ask(frames=40))  # its steps between the failures do not reset their count
    for number in range(2):
        engine.add(number, ask())
        for _ in range(3):
            engine.step()
    engine.add(2, ask())
    with pytest.raises(ValueError, match="tripped"):
        engine.step()
    monkeypatch.undo()
    engine.abort(2)
    engine.abort(20)
    assert speak(engine, ask()).codes.size
    assert engine.is_idle


@pytest.mark.parametrize("before", [[], [ValueError("tripped")]])
def test_a_lost_device_ends_engines(engine: Engine, monkeypatch: pytest.MonkeyPatch, before: list[Exception]) -> None:
    """Together, or once its sequences are tried alone."""
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "prefill", Mock(side_effect=[*before, lost]))
        engine.add(1, ask())
        with pytest.raises(torch.AcceleratorError):
            engine.step()
    engine.abort(1)


@pytest.mark.parametrize("fault", ["raises", "not finite"])
def test_an_engine_that_cannot_warm_up_says_so(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    engine = build_engine(checkpoint, CONFIG)
    if fault == "raises":
        trip(monkeypatch, engine.runner, {-1})
    else:
        monkeypatch.setattr(engine.runner.state, "hidden", engine.runner.state.hidden * torch.nan)
        monkeypatch.setattr(
            engine.runner, "prefill", lambda sequences: [engine.runner._writer.write_row(s, []) for s in sequences]
        )
    with pytest.raises(EngineError):
        warm_up(engine)


HUGE = "word " * 400_000
TOO_LONG: dict[str, tuple[str, SynthesisRequest]] = {
    "text": ("CustomVoice", ask(HUGE)),
    "instructions": ("VoiceDesign", ask(voice=None, instructions=HUGE)),
    "a later segment": ("CustomVoice", ask(following=("Short.", HUGE))),
    "transcript": (
        "Base",
        replace(clone("Hi.", in_context=True), reference=Reference(np.zeros(9600, np.float32), HUGE)),
    ),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_text_is_refused_by_its_bytes(engine_of: Kinds, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is tokenized, which takes seconds in which no other thread runs."""
    kind, request = TOO_LONG[name]
    engine, seen = engine_of(kind), list[int]()
    places = engine.prompts.tokenizer.encode_places
    monkeypatch.setattr(engine.prompts.tokenizer, "encode_places", lambda text: seen.append(len(text)) or places(text))
    with pytest.raises(InvalidRequest) as caught:
        engine.add(0, request)
    assert (caught.value.code, engine.input_processor.long_texts(request)) == ("context_length_exceeded", [])
    monkeypatch.setattr("deployments.talker.engine.input_processor._LONG_CHARS", 150)
    long = "word " * 40
    assert engine.input_processor.long_texts(ask(long, following=("Short.", long))) == [long, long]
    assert max(seen, default=0) < 1000
    assert engine.is_idle
