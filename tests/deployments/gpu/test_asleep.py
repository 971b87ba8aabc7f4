"""What the driver is asked, in order, and what is said of its refusals. test_engine_client.py asks a real one."""

import ctypes
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from deployments.errors import EngineError
from deployments.gpu import asleep

LOCK, CHECKPOINT, RESTORE, UNLOCK = (f"cuCheckpointProcess{end}" for end in ("Lock", "Checkpoint", "Restore", "Unlock"))


@pytest.mark.parametrize(("change", "refused", "asked"), [
    (asleep.send_to_sleep, None, [LOCK, CHECKPOINT]), (asleep.send_to_sleep, LOCK, [LOCK]),
    (asleep.send_to_sleep, CHECKPOINT, [LOCK, CHECKPOINT, UNLOCK]),  # else the engine would stand still for good
    (asleep.wake, None, [RESTORE, UNLOCK]), (asleep.wake, RESTORE, [RESTORE]),
])  # fmt: skip
def test_the_driver_is_asked(
    change: Callable[[int], None], refused: str | None, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, calls = Mock(), list[str]()
    driver.cuGetErrorName = lambda status, name: setattr(name._obj, "value", b"CUDA_ERROR_OUT_OF_MEMORY")
    for name in (LOCK, CHECKPOINT, RESTORE, UNLOCK):

        def call(process: ctypes.c_int, arguments: Any, name: str = name) -> int:
            assert (process.value, name != LOCK or arguments._obj.timeout_ms) == (7, name != LOCK or 2000)
            calls.append(name)
            return 2 * (name == refused)

        setattr(driver, name, call)
    monkeypatch.setattr(asleep, "_driver", lambda: driver)
    if refused is None:
        change(7)
    else:
        with pytest.raises(EngineError, match=r"failed for process 7: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
            change(7)
    assert calls == asked


def test_an_old_driver_or_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asleep, "_driver", lambda: object())
    with pytest.raises(EngineError, match="570 or newer: this driver lacks cuCheckpointProcessLock"):
        asleep.send_to_sleep(7)
    monkeypatch.undo()
    for library, says in ((Mock(side_effect=OSError("no file")), "no file"), (Mock(), r"\(status 100\)")):
        library.return_value.cuInit.return_value = 100
        monkeypatch.setattr(ctypes, "CDLL", library)
        with pytest.raises(EngineError, match=says):
            asleep._driver.__wrapped__()
