"""Suspends another process's use of a GPU, and resumes it, with the driver's checkpoints (Linux, driver 570 or newer).

While a process sleeps its memory on the GPU is copied to the host's, and the GPU is released completely. Its CUDA calls
wait. After waking, everything is at the same addresses, so that captured work (CUDA graphs) stays valid.
"""

import ctypes
from functools import cache

from deployments.errors import EngineError

_LIBRARY = "libcuda.so.1"
_LEAST_DRIVER = 570
_LOCK_TIMEOUT_MS = 2000  # for work that already runs on the GPU


class _LockArguments(ctypes.Structure):
    _fields_ = (("timeout_ms", ctypes.c_uint), ("reserved_0", ctypes.c_uint), ("reserved_1", ctypes.c_uint64 * 7))


def send_to_sleep(process: int) -> None:
    """Return once the process has left the GPU. Raises EngineError, and leaves the process awake, if that fails."""
    locking = _LockArguments(timeout_ms=_LOCK_TIMEOUT_MS)
    _call_driver("cuCheckpointProcessLock", process, ctypes.byref(locking))
    try:
        _call_driver("cuCheckpointProcessCheckpoint", process, None)
    except EngineError:
        _call_driver("cuCheckpointProcessUnlock", process, None)
        raise


def wake(process: int) -> None:
    """Return once the process has its GPU memory back. Raises EngineError, for instance if others took the memory."""
    _call_driver("cuCheckpointProcessRestore", process, None)
    _call_driver("cuCheckpointProcessUnlock", process, None)


def _call_driver(function: str, process: int, arguments: object) -> None:
    driver = _driver()
    try:
        status = getattr(driver, function)(ctypes.c_int(process), arguments)
    except AttributeError:
        raise EngineError(
            f"keep_alive needs an NVIDIA driver {_LEAST_DRIVER} or newer: this one has no {function}"
        ) from None
    if status:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        raise EngineError(f"{function} of process {process}: {(name.value or b'error').decode()} ({status})")


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise EngineError(f"keep_alive needs NVIDIA's driver: {error}") from None
    if status := driver.cuInit(0):
        raise EngineError(f"keep_alive needs NVIDIA's driver, which does not start here ({status})")
    return driver
