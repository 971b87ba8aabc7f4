"""Suspend and resume another process's use of a GPU with the driver's checkpoint API (Linux, driver 570 or newer).

While a process is suspended, its GPU memory is kept in host memory, and the GPU is released completely. The process's
CUDA calls block. Resuming restores all addresses, so captured CUDA graphs stay valid.
"""

import ctypes
from functools import cache

from deployments.errors import EngineError

_LIBRARY = "libcuda.so.1"
_LEAST_DRIVER = 570
_LOCK_TIMEOUT_MS = 2000  # time limit for work that is already running on the GPU


class _LockArguments(ctypes.Structure):
    _fields_ = (("timeout_ms", ctypes.c_uint), ("reserved_0", ctypes.c_uint), ("reserved_1", ctypes.c_uint64 * 7))


def send_to_sleep(process: int) -> None:
    """Suspend the process and release its GPU memory. On failure, raises EngineError and leaves the process running."""
    locking = _LockArguments(timeout_ms=_LOCK_TIMEOUT_MS)
    _call_driver("cuCheckpointProcessLock", process, ctypes.byref(locking))
    try:
        _call_driver("cuCheckpointProcessCheckpoint", process, None)
    except EngineError:
        _call_driver("cuCheckpointProcessUnlock", process, None)
        raise


def wake(process: int) -> None:
    """Resume the process and restore its GPU memory. Raises EngineError, for example if the GPU is out of memory."""
    _call_driver("cuCheckpointProcessRestore", process, None)
    _call_driver("cuCheckpointProcessUnlock", process, None)


def _call_driver(function: str, process: int, arguments: object) -> None:
    driver = _driver()
    try:
        status = getattr(driver, function)(ctypes.c_int(process), arguments)
    except AttributeError:
        raise EngineError(
            f"keep_alive_s requires NVIDIA driver {_LEAST_DRIVER} or newer: this driver lacks {function}"
        ) from None
    if status:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        raise EngineError(f"{function} failed for process {process}: {(name.value or b'error').decode()} ({status})")


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise EngineError(f"keep_alive_s requires NVIDIA's driver: {error}") from None
    if status := driver.cuInit(0):
        raise EngineError(f"keep_alive_s requires NVIDIA's driver, which failed to initialize (status {status})")
    return driver
