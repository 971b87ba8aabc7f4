"""These run where Triton is, with or without a GPU."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton: make kernels installs it")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from deployments.gpu.compile_ahead import CompileWorkers, Kernel, compile_kernel, noted_launches  # noqa: E402
from deployments.talker.kernels.matmul import like_rows, measure_squares  # noqa: E402


@dataclass
class Driver:
    """What Triton asks of a GPU before it launches."""

    capability: tuple[int, int] = (9, 0)

    def get_current_target(self) -> GPUTarget:
        major, minor = self.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    return tmp_path


def launch(width: int) -> None:
    measure_squares(like_rows(2, width, torch.zeros(1)))


def hits(kernels: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    were_cached: list[bool] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        were_cached.append(cache_hit)

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    for kernel in kernels:
        compile_kernel(kernel)
    return were_cached


def test_what_was_noted_is_compiled_into_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with noted_launches() as kernels:
        for width in (32, 64, 32):
            launch(width)
    assert [kernel.function for kernel in kernels] == ["_row_squares"] * 2
    reports: list[tuple[int, int]] = []
    monkeypatch.setattr("deployments.gpu.compile_ahead._MAX_WORKERS", 2)
    with CompileWorkers() as workers:
        workers.compile(kernels, lambda done, total: reports.append((done, total)))
    assert reports == [(0, 2), (1, 2), (2, 2)]
    assert hits(kernels, monkeypatch) == [True, True]


KEYS = """
import importlib, json, sys
from triton.runtime import JITFunction
modules = map(importlib.import_module, sys.argv[2:])
kernels = [(f"{module.__name__}.{name}", each) for module in modules for name, each in vars(module).items()
           if isinstance(each, JITFunction)]
print(json.dumps({name: each.cache_key for name, each in kernels[:: int(sys.argv[1])]}))
"""


def test_keys_do_not_depend_on_the_order_of_launches() -> None:
    files = (file for file in Path("deployments").rglob("*.py") if "@triton.jit" in file.read_text(encoding="utf-8"))
    modules = [".".join(file.with_suffix("").parts) for file in files]
    first, last = (
        json.loads(subprocess.check_output([sys.executable, "-c", KEYS, order, *modules])) for order in ("1", "-1")
    )
    assert first == last
    assert len(first) >= 40


def test_a_failure_is_logged(cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with noted_launches() as kernels:
        launch(32)
    broken = replace(kernels[0], function="_no_such_kernel")
    monkeypatch.setattr("deployments.gpu.compile_ahead._MAX_WORKERS", 1)
    with CompileWorkers() as workers, caplog.at_level(logging.WARNING):
        workers.compile([broken, *kernels], lambda done, total: None)
    assert "_no_such_kernel was not compiled ahead" in caplog.text
    assert len(caplog.records) == 1
