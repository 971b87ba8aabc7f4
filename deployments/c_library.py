"""Libraries of C kernels for CPUs, built with the package if there is a compiler (pyproject.toml)."""

import ctypes
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

POINTER, COUNT = ctypes.c_void_p, ctypes.c_ssize_t


def built_library(module: str, parameters: Mapping[str, Sequence[object]], *, interface: int) -> ctypes.CDLL | None:
    """The library that replaces `module`, with the parameters of its functions, which return nothing. None if it was
    not built, or if its functions have another `interface`.
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
