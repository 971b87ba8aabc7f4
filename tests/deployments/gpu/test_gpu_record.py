"""A talker on a GPU that is not there: what is captured, launched and copied, and what waits for what.

Tensors lie in the host's memory and say that they are on a GPU. Triton is replaced, whose kernels only tell what they
are given: `matmul(#3[4x64 +128], ...)` takes four rows of the third memory seen, from its element 128 on.
"""

import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from deployments.codec.plain_slots import PlainSlots
from deployments.config import TalkerConfig
from deployments.protocol import Mailbox, Progress, Reference
from deployments.talker.engine import device, startup
from deployments.talker.model.model_config import ModelConfig
from deployments.weights import checkpoint as checkpoints
from tests.deployments.talker.driving import ask
from tests.records import Record, shown
from tests.virtual_time import virtual_clock

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MODULES = ("language", "language.random", "language.extra.cuda", "tools.tensor_descriptor", "runtime", "language.extra")


class OnGpu(TorchFunctionMode):
    """Tensors for a GPU are made in the host's memory, filled with zeros, and say that they are on the GPU."""

    def __init__(self, gpu: "Gpu") -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: self._plain(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if getattr(func, "__module__", "") == "torch.nn.init" and not next(iter((*args, *kwargs.values()))).is_meta:
            self._gpu.tell("draws", func.__name__)
        if func in (torch.Tensor.copy_, torch.Tensor.__setitem__) and args[0].dtype is not torch.float32:
            is_integer = isinstance(source := args[-1], torch.Tensor) and source.dtype is torch.int32
            checksum = {"checksum": zlib.crc32(source.numpy().tobytes())} if is_integer else {}
            self._gpu.launch(func.__name__, "", args, checksum)
        func = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}.get(func, func)
        result = func(*map(self._plain, args), **kwargs)
        return GPU if isinstance(result, torch.device) and result == CPU else result

    @staticmethod
    def _plain(value: Any) -> Any:
        return CPU if isinstance(value, torch.device | str) and str(value).startswith("cuda") else value


class Gpu:
    """What there would be of torch.cuda and Triton."""

    def __init__(self, record: Record) -> None:
        self.record, self.names, self.memory = record, count(1), dict[int, tuple[int, Any]]()
        self.launched, self.told, self.is_compiling = list[str](), set[frozenset[str]](), False
        self.streams = [self.named("Stream")]

    def shown(self, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return shown(value)
        storage = value.untyped_storage()
        is_new = storage.data_ptr() not in self.memory
        number, _ = self.memory.setdefault(storage.data_ptr(), (len(self.memory) + 1, storage))
        size = f" of {storage.nbytes()}" if is_new else ""
        strides = "" if value.is_contiguous() else f" by {value.stride()}"
        kind = str(value.dtype)[6:]
        return f"#{number}{size}[{'x'.join(map(str, value.shape))}{strides} +{value.storage_offset()} {kind}]"

    def jit(self, function: Callable[..., object] | None = None, **options: object) -> Any:
        if function is None:
            return lambda function: self.jit(function, **options)
        gpu, name = self, function.__name__

        class Kernel:
            def __getitem__(self, grid: object) -> Callable[..., None]:
                return lambda *args, **options: gpu.launch(name, grid, args, options)

        return Kernel()

    def launch(self, name: str, grid: object, args: Any, options: Any) -> None:
        told = [*map(self.shown, args), *(f"{key}={self.shown(value)}" for key, value in options.items())]
        self.launched.append(f"    {name}{grid} {', '.join(told)}")

    def flush(self) -> None:
        """Tell what was launched since the last event: all of it if these kernels were not together before."""
        launched, self.launched, half = self.launched, [], len(self.launched) // 2
        if launched[:half] == launched[half:]:  # runs before a capture
            launched = launched[:half]
        kernels = frozenset(re.sub(r"\w+_matmul|\W.*", "", line.strip()) for line in launched)
        if len(launched) > 5:
            checksum = zlib.crc32("\n".join(launched).encode())
            self.record(f"    {len(launched)} launches, checksum {checksum:08x}")
            if self.is_compiling or kernels in self.told:
                return
            self.told.add(kernels)
        for line in launched:
            self.record(line)

    def named(self, kind: str, *args: object, **options: object) -> Any:
        """A stream, event or graph, which tells what is done with it."""
        name = f"{kind} {next(self.names)}"
        told = ("record", "synchronize", "wait_stream", "replay")
        methods = {each: partial(self.tell, name, each) for each in told}
        self.tell(name, "is made", *args, **options)
        asked = count()
        return SimpleNamespace(query=lambda: next(asked) > 1, elapsed_time=lambda other: 1.5, name=name, **methods)

    def tell(self, name: str, what: str, *args: Any, **options: Any) -> None:
        self.flush()
        told = (*args, *(f"{key} {value}" for key, value in options.items()))
        self.record(f"  {name} {what}", *(Raw(getattr(each, "name", each)) for each in told))

    def decoder(self, load: Callable[..., object], *args: Any, num_slots: int, **options: Any) -> object:
        self.tell("loads a decoder", f"of {num_slots} slots")
        return load(*args, num_slots=num_slots, **options)

    @contextmanager
    def compiling_ahead(self, facts: str, phase: Any, progress: Any) -> Iterator[Callable[[Callable[[], None]], None]]:
        def precompile(work: Callable[[], None]) -> None:
            self.is_compiling = True
            work()
            self.tell("compiled", "")
            self.is_compiling = False

        _, *others = facts.splitlines()
        self.tell("compiles ahead", *others[:3])
        progress(1, 2)
        with phase("compiling"):
            yield precompile

    @contextmanager
    def on(self, kind: str, *args: Any, **options: Any) -> Iterator[None]:
        self.tell(kind, "begins", *args, **options)
        self.streams.append(args[0] or self.streams[-1])
        yield
        self.streams.pop()
        self.tell(kind, "ends")


@pytest.fixture
def gpu(
    name: str, tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Gpu]:
    tiny_checkpoint(name)
    if find_spec("triton"):
        pytest.skip("Triton is installed, and launches kernels: make kernels")
    gpu, before = Gpu(Record()), set(sys.modules)
    triton = MagicMock(jit=gpu.jit, next_power_of_2=lambda n: 1 << (n - 1).bit_length(), cdiv=lambda a, b: -(-a // b))
    triton.__spec__ = object()
    triton.runtime.driver.active.utils.get_device_properties = lambda index: {"max_shared_mem": 227 << 10}
    monkeypatch.setitem(sys.modules, "triton", triton)
    for module in MODULES:
        monkeypatch.setitem(sys.modules, f"triton.{module}", MagicMock())
    monkeypatch.setenv("TALKRAY_CACHE", str(tmp_path))
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: False)
    card = SimpleNamespace(name="H200", major=9, minor=0, total_memory=24 << 30)
    capability = (9, 0) if name == "CustomVoice" else (8, 0)
    free = count(23 << 30, -(1 << 28))
    fakes = {
        "is_available": lambda: True,
        "get_device_capability": lambda device: capability,
        "get_device_name": lambda: "H200",
        "get_device_properties": lambda device: card,
        "current_device": lambda: 0,
        "mem_get_info": lambda device: (next(free), 24 << 30),
        "current_stream": lambda: gpu.streams[-1],
        "graph_pool_handle": lambda: "a pool",
        **{kind: partial(gpu.named, kind) for kind in ("Event", "Stream", "CUDAGraph")},
        **{kind: partial(gpu.on, kind) for kind in ("stream", "graph")},
        **{call: partial(gpu.tell, call, "") for call in ("synchronize", "empty_cache")},
    }
    for member, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, member, fake)
    monkeypatch.setattr(torch, "set_num_threads", partial(gpu.tell, "threads", ""))
    load = ModelConfig.load
    monkeypatch.setattr(ModelConfig, "load", lambda folder: reading(load(folder)))
    monkeypatch.setattr(checkpoints, "upload", read)
    load_slots = PlainSlots.load
    monkeypatch.setattr(PlainSlots, "load", lambda *args, **options: gpu.decoder(load_slots, *args, **options))
    monkeypatch.setattr(device, "_use_cpus_near", lambda gpu: "4 of 8 CPUs")
    half = property(lambda slots: "float16", lambda slots, value: None)
    monkeypatch.setattr(PlainSlots, "precision", half, raising=False)
    monkeypatch.setattr(device, "torch_cuda", lambda: (13, 0))
    monkeypatch.setattr(device, "gpu_startup_lock", partial(gpu.on, "lock", None))
    ahead: Any = SimpleNamespace(compiling_ahead=gpu.compiling_ahead)
    monkeypatch.setitem(sys.modules, "deployments.gpu.compile_ahead", ahead)
    with OnGpu(gpu):
        yield gpu
    for module in set(sys.modules) - before:
        del sys.modules[module]


def reading(config: ModelConfig) -> ModelConfig:
    return replace(config, text=replace(config.text, alignment_head=(1, 3)))


def read(names: dict[Path, list[str]], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor for file in names for name, tensor in load_file(file).items() if name in names[file]}


class Raw(str):
    __repr__ = str.__str__


@pytest.mark.parametrize(("name", "deterministic"), [("CustomVoice", False), ("Base", True)])
def test_an_engine(
    gpu: Gpu, name: str, deterministic: bool, tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = virtual_clock(monkeypatch)
    config = TalkerConfig(
        device="cuda", threads=2, max_num_seqs=3, max_num_waiting=5, max_model_len=1000, deterministic=deterministic
    )
    started = startup.StartClock(gpu.record)
    engine = startup.load_engine(tiny_checkpoint(name), config, started, makes_audio=not deterministic)

    told = replace(engine.info, fingerprint=""), engine.scheduler.max_num_seqs, engine.scheduler.max_num_waiting
    num_bytes = sum(each.nbytes for each in engine.runner.networks.talker.parameters())
    gpu.tell(
        "is built:",
        *map(shown, told),
        f"{engine.scheduler.blocks.num_blocks} blocks",
        f"{num_bytes} bytes",
        engine.scheduler._pacing._max_lead_s,
    )
    voice: dict[str, Any] = {"voice": "ryan"}
    if name == "Base":
        hiss = np.random.default_rng(1).normal(0, 0.01, 24000).astype(np.float32)
        frames = np.arange(48, dtype=np.int16).reshape(3, 16)
        voice = {"voice": None, "reference": Reference(hiss, "Hiss."), "resume": Progress(frames, 0)}
    other = voice | ({"resume": Progress(frames[:1], 0)} if "resume" in voice else {})
    engine.add(1, ask(frames=9, mailbox=Mailbox("h", 1, "t"), **voice))
    engine.add(2, ask("A text that takes two passes. " * 20, frames=4, gpu_frames=3, non_streaming_mode=True, **other))
    engine.append_text(1, "one two three ", is_last=False)
    busy = iter([
        partial(engine.add, 4, ask(frames=9, **voice)),
        partial(engine.abort, 4),  # in a lane
        partial(engine.add, 3, ask(frames=5, instructions="Slowly.", mailbox=Mailbox("h", 2, "t"), **voice)),
        partial(engine.append_text, 3, "one two three four ", is_last=False),
        partial(engine.append_text, 3, "five", is_last=True),
        partial(engine.append_text, 1, "four", is_last=True),
    ])  # fmt: skip
    while not engine.is_idle:
        clock.now_s += 0.02
        gpu.tell("step", f"{clock.now_s:.2f}")
        for number, chunk in engine.step(lambda: next(busy, lambda: None)()).chunks:
            sizes = f"{len(chunk.codes)} frames", f"{len(chunk.pcm)} bytes"
            gpu.tell(f"  {number}:", *sizes, chunk.num_text_tokens, chunk.finish_reason)
    engine.check_integrity()
    gpu.flush()
    gpu.record.check(f"gpu-{name.lower()}")


def test_an_engine_on_a_cpu(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainSlots, "load", lambda *args, **options: pytest.fail("no frame has been asked for"))
    startup.load_engine(checkpoint, TalkerConfig(device="cpu"), startup.StartClock())
