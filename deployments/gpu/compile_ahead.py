"""Ahead-of-time compilation of Triton kernels, in as many processes as there are CPUs.

Triton compiles each kernel when it is first launched, one after the other. This module runs the work once, recording
launches instead of performing them. Worker processes compile the recorded kernels into Triton's cache folder, where
later launches find them. The workers do not use the GPU.
"""

import hashlib
import importlib
import json
import logging
import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

logger = logging.getLogger(__name__)

_MAX_WORKERS = 16  # each worker imports torch, which uses about a third of a gigabyte of memory
_WORKER = "import torch; from deployments.gpu.compile_ahead import serve_standard_streams as serve; serve()"

ProgressCallback = Callable[[int, int], None]
"""Called with the number of compiled kernels and the total number of kernels."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Input to Triton's compiler: one kernel with one combination of argument types."""

    module: str
    function: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], object]
    attributes: dict[tuple[int, ...], list[list[object]]]
    options: dict[str, object]
    target: tuple[str, int, int]  # backend, architecture, warp size


@contextmanager
def compiling_ahead(
    facts: str, phase: Callable[[str], AbstractContextManager[None]], progress: ProgressCallback
) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Yield a function that compiles the kernels launched by some work in parallel, with a `phase` for each step.

    `facts` are their dependencies besides code and versions. A stamp in the cache marks facts for which all kernels
    have been compiled. Kernels deleted later are compiled when they are launched.
    """
    stamp = Path(knobs.cache.dir) / "complete" / _digest(f"{triton.__version__} {facts}")
    if stamp.exists():
        yield lambda work: None
        return
    with CompileWorkers() as workers:

        def precompile(work: Callable[[], None]) -> None:
            with phase("looking for kernels to compile"), noted_launches() as kernels:
                work()
            with phase("compiling kernels"):
                workers.compile(kernels, progress)

        yield precompile
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.touch()


def _digest(facts: str) -> str:
    state = hashlib.sha256(facts.encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        state.update(file.read_bytes())
    return state.hexdigest()[:32]


@contextmanager
def noted_launches() -> Iterator[list[Kernel]]:
    """Record each kernel launched in this block once, instead of launching it, unless it is already loaded."""
    noted: dict[str, Kernel] = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:  # noqa: A002  # Triton's name
        unique = f"{fn.module}.{fn.name}{key}"
        if unique not in noted:
            noted[unique] = _kernel(fn.jit_function, compile)
        return True  # makes Triton neither compile nor launch the kernel

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    kernels: list[Kernel] = []
    try:
        yield kernels
    finally:
        knobs.runtime.jit_cache_hook = before
        kernels.extend(noted.values())


def _kernel(function: Any, compiled: dict[str, Any]) -> Kernel:
    target = triton.runtime.driver.active.get_current_target()
    return Kernel(
        module=function.fn.__module__,
        function=function.fn.__qualname__,
        signature=compiled["signature"],
        constants=compiled["constants"],
        attributes=compiled["configs"][0],
        options={
            name: _as_tuple(value) for name, value in json.loads(compiled["specialization_data"])["options"].items()
        },
        target=(target.backend, target.arch, target.warp_size),
    )


def _as_tuple(value: object) -> object:
    return tuple(_as_tuple(each) for each in value) if isinstance(value, list) else value


class CompileWorkers:
    """Pool of compiler processes, started by the constructor so that they import while the caller loads weights."""

    def __init__(self) -> None:
        number = min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
        command = [sys.executable, "-c", _WORKER]  # import torch early, because the kernels' modules need it
        # A worker exits when its standard input closes, so workers never outlive this process.
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(number)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.kill()  # safe at any time, because Triton renames complete files into its cache
            process.stdin.close()
            process.stdout.close()
            process.wait()

    def compile(self, kernels: Sequence[Kernel], report: ProgressCallback) -> None:
        """Compile all kernels into the cache. A failure is logged, and launching the kernel raises the error again."""
        idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for process in self._processes:
            idle.put(process)

        def compile_one(kernel: Kernel) -> None:
            process = idle.get()
            try:
                problem = _ask(process, kernel)
            finally:
                idle.put(process)
            if problem is not None:
                logger.warning("%s.%s was not compiled ahead: %s", kernel.module, kernel.function, problem)

        report(0, len(kernels))
        with ThreadPoolExecutor(len(self._processes)) as threads:
            for number, _ in enumerate(as_completed([threads.submit(compile_one, kernel) for kernel in kernels])):
                report(number + 1, len(kernels))


def _ask(process: "subprocess.Popen[bytes]", kernel: Kernel) -> str | None:
    """Return the worker's error, or None on success."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pickle.dump(kernel, process.stdin)
        process.stdin.flush()
        problem: str | None = pickle.load(process.stdout)
    except (EOFError, OSError) as error:
        return f"the compiler process ended: {error!r}"
    except (pickle.PickleError, TypeError, AttributeError) as error:
        return f"the kernel cannot be pickled: {error!r}"
    return problem


def serve_standard_streams() -> None:
    """Run a worker: read pickled kernels, and write None or an error for each, until standard input ends.

    Text that kernels print goes to standard error.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        while True:
            try:
                kernel: Kernel = pickle.load(sys.stdin.buffer)
                pickle.dump(_try(kernel), answers)
                answers.flush()
            except (EOFError, BrokenPipeError):
                return


def _try(kernel: Kernel) -> str | None:
    try:
        compile_kernel(kernel)
    except Exception as error:  # launching the kernel raises the error again, with a traceback
        return f"{type(error).__name__}: {error}"
    return None


def compile_kernel(kernel: Kernel) -> None:
    """Compile a kernel, and the C function that launches it, into the cache, unless they are already there."""
    function = getattr(importlib.import_module(kernel.module), kernel.function)
    source = ASTSource(function, kernel.signature, kernel.constants, kernel.attributes)
    compiled = compile_source(source, target=GPUTarget(*kernel.target), options=kernel.options)
    if torch.cuda.is_available():  # the C function needs the driver's library
        triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)
