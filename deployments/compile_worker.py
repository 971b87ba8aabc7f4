"""Compiles Triton kernels for another process: `python -m deployments.compile_worker`.

Pickled `Kernel`s come in on standard input; for each one goes out on standard output: None, or what went wrong. The
compiled kernel is left in Triton's cache folder. The process ends when its input does. It needs no GPU.
"""

import importlib
import os
import pickle
import sys
from typing import BinaryIO

import torch  # noqa: F401  # the kernels' modules want it: imported while nothing waits
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from deployments.kernel_compiler import Kernel


def compile_kernel(kernel: Kernel) -> None:
    """Leave a kernel in the cache; nothing happens where it is there."""
    function = getattr(importlib.import_module(kernel.module), kernel.function)
    source = ASTSource(function, kernel.signature, kernel.constants, kernel.attributes)
    compile_source(source, target=GPUTarget(*kernel.target), options=kernel.options)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer each request until they end."""
    while True:
        try:
            kernel: Kernel = pickle.load(requests)
        except EOFError:
            return
        try:
            compile_kernel(kernel)
            problem = None
        except Exception as error:  # whoever launches the kernel meets it again, with a traceback
            problem = f"{type(error).__name__}: {error}"
        try:
            pickle.dump(problem, answers)
            answers.flush()
        except BrokenPipeError:
            return


def main() -> None:
    """Serve on the standard streams; what anybody prints goes to standard error."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
