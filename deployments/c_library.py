"""Loader for the CPU kernels written in C, which the package build compiles if a compiler is available."""

import ctypes
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

POINTER, COUNT = ctypes.c_void_p, ctypes.c_ssize_t


def built_library(module: str, parameters: Mapping[str, Sequence[object]], *, interface: int) -> ctypes.CDLL | None:
    """Load the library that replaces `module`. `parameters` maps each function to its C types; all return void.

    Returns None if the library was not built, or if its `interface` version does not match.
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    if library.interface() != interface:
        return None
    for name, types in parameters.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library
