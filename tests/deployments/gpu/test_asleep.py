"""What the driver is asked, in order, and what is said of each refusal. A test of a real GPU is beside the client."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from deployments.errors import EngineError
from deployments.gpu import asleep

LOCK, CHECKPOINT, RESTORE, UNLOCK = ("Lock", "Checkpoint", "Restore", "Unlock")


class Driver:
    """Refuses one function with status 2, or lacks it."""

    def __init__(self, refused: str, *, is_old: bool = False) -> None:
        self.asked, self.refused, self.is_old = list[str](), refused, is_old

    def cuGetErrorName(self, status: int, name: Any) -> None:  # noqa: N802
        name._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"

    def __getattr__(self, name: str) -> Callable[[ctypes.c_int, Any], int]:
        function = name.removeprefix("cuCheckpointProcess")
        if self.is_old and function == self.refused:
            raise AttributeError(name)

        def call(process: ctypes.c_int, arguments: Any) -> int:
            assert process.value == 7
            if function == LOCK:
                assert arguments._obj.timeout_ms == 2000, "without a limit, it would wait for ever"
            self.asked.append(function)
            return 2 * (function == self.refused)

        return call


@pytest.mark.parametrize(("change", "refused", "asked"), [
    (asleep.send_to_sleep, "", [LOCK, CHECKPOINT]), (asleep.send_to_sleep, LOCK, [LOCK]),
    (asleep.send_to_sleep, CHECKPOINT, [LOCK, CHECKPOINT, UNLOCK]),  # else the engine would stand still for good
    (asleep.wake, "", [RESTORE, UNLOCK]), (asleep.wake, RESTORE, [RESTORE]),
])  # fmt: skip
def test_the_driver_is_asked(
    change: Callable[[int], None], refused: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asleep, "_driver", lambda: driver)
    for driver in (Driver(refused), Driver(refused, is_old=True)):
        if refused:
            says = "driver 570 or newer" if driver.is_old else r"failed for process 7: CUDA_ERROR_OUT_OF_MEMORY \(2\)"
            with pytest.raises(EngineError, match=says):
                change(7)
        else:
            change(7)
        assert driver.asked == [each for each in asked if each != refused or not driver.is_old]


@pytest.mark.parametrize(("library", "reason"), [
    (lambda name: (_ for _ in ()).throw(OSError("no libcuda.so.1")), "no libcuda.so.1"),
    (lambda name: type("Library", (), {"cuInit": lambda self, flags: 100})(), r"failed to initialize \(status 100\)"),
])  # fmt: skip
def test_no_driver(library: Callable[[str], object], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", library)
    with pytest.raises(EngineError, match=reason):
        asleep._driver.__wrapped__()
