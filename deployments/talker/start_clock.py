"""How long each part of a start takes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str], None]

_WORTH_SAYING_S = 0.05
_REPORT_S = 1.0


class StartClock:
    """Phases of a start in their order; the report hears of each as it begins."""

    def __init__(self, report: Report = lambda stage: None) -> None:
        self.report = report
        self.seconds: dict[str, float] = {}
        self._nested_s = 0.0  # of phases within the one that runs

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time under `name`, without that of phases within; the same name may come again."""
        self.report(name)
        start_s, outer_s, self._nested_s = time.perf_counter(), self._nested_s, 0.0
        try:
            yield
        finally:
            whole_s = time.perf_counter() - start_s
            self.seconds[name] = self.seconds.get(name, 0.0) + whole_s - self._nested_s
            self._nested_s = outer_s + whole_s

    def summary(self) -> str:
        """All phases that took a while, in one line."""
        parts = [f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items() if seconds >= _WORTH_SAYING_S]
        return f"{sum(self.seconds.values()):.1f} s in all: " + ", ".join(parts)


def throttled(what: str, report: Report) -> Callable[[int, int], None]:
    """Reports such as "compiling kernels 12/345", at most one a second."""
    last_s = -_REPORT_S

    def progress(done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= _REPORT_S:
            last_s = now_s
            report(f"{what} {done}/{total}")

    return progress
