"""Scenario records: everything that a deterministic scenario shows, compared with a text file in data/records.

`TALKRAY_RENEW=1` writes the file anew. Read its diff before you commit it: each changed line is a changed behaviour.
"""

import dataclasses
import difflib
import enum
import logging
import os
import re
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "data" / "records"


def shown(value: object) -> str:
    """A value as text that is the same on every machine: no addresses, no digits that depend on the processor."""
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, bytes | bytearray | memoryview) and len(value) > 48:
        return f"<{len(value)} bytes>"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if f.repr]
        return f"{type(value).__name__}({', '.join(f'{f.name}={shown(getattr(value, f.name))}' for f in fields)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{shown(k)}: {shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(shown, value))) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(shown, value))
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"<{str(value.dtype).rpartition('.')[2]} {'x'.join(map(str, value.shape))}>"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def arguments(*args: object, **kwargs: object) -> str:
    return ", ".join([*map(shown, args), *(f"{k}={shown(v)}" for k, v in kwargs.items())])


class Record(logging.Handler):
    """Lines of one scenario. `masks` are pairs of a pattern and its replacement, for what no run repeats."""

    def __init__(self, *masks: tuple[str, str]) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._masks = masks

    def __call__(self, event: str, *args: object, **kwargs: object) -> None:
        """One event: its name, and whatever belongs to it."""
        line = f"{event} {arguments(*args, **kwargs)}".rstrip().replace("\n", "\\n")
        for pattern, replacement in self._masks:
            line = re.sub(pattern, replacement, line)
        self.lines.append(line)

    def attempt(self, event: str, call: Callable[[], object]) -> object:
        """Make a call, and record what it returned or raised. An error is not raised again."""
        try:
            result = call()
        except Exception as error:
            self(f"{event} !", error)
            return error
        self(f"{event} ->", result)
        return result

    async def attempt_async(self, event: str, call: Awaitable[object]) -> object:
        try:
            result = await call
        except Exception as error:
            self(f"{event} !", error)
            return error
        self(f"{event} ->", result)
        return result

    def fake(self, name: str, answer: Callable[..., object] = lambda *args, **kwargs: None) -> Callable[..., object]:
        """A function that records its calls with all arguments."""

        def called(*args: object, **kwargs: object) -> object:
            self(f"  {name}({arguments(*args, **kwargs)})")
            return answer(*args, **kwargs)

        return called

    def emit(self, record: logging.LogRecord) -> None:
        self(f"  log {record.levelname}: {record.getMessage()}")
        if record.exc_info and record.exc_info[1]:
            self("    raised", record.exc_info[1])

    @contextmanager
    def logs(self, *loggers: str) -> Generator[None]:
        """Record what these loggers write, from DEBUG on."""
        before = [(logging.getLogger(name), logging.getLogger(name).level) for name in loggers]
        for logger, _ in before:
            logger.addHandler(self)
            logger.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            for logger, level in before:
                logger.removeHandler(self)
                logger.setLevel(level)

    def check(self, name: str) -> None:
        """Fail with a diff if the lines differ from data/records/`name`.txt."""
        file = FOLDER / f"{name}.txt"
        if os.environ.get("TALKRAY_RENEW"):
            file.write_text("\n".join(self.lines) + "\n", encoding="utf-8")
        stored = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
        if stored != self.lines:
            test = os.environ["PYTEST_CURRENT_TEST"].split(" (")[0]
            diff = list(difflib.unified_diff(stored, self.lines, f"records/{name}.txt", "this run", lineterm="", n=2))
            rest = [f"... {len(diff) - 80} more lines"] * (len(diff) > 80)
            renew = f"If the change is meant: TALKRAY_RENEW=1 pytest -n0 '{test}', then review the diff."
            pytest.fail("\n".join([*diff[:80], *rest, renew]), pytrace=False)
