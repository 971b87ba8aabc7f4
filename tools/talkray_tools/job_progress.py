"""Display the progress of a job: a bar with the remaining time on a terminal, otherwise one line per tenth."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from talkray_tools.job_client import JobProgress

_TENTHS = 10


class JobLine:
    """Progress display for one stage of work."""

    def __init__(self, console: Console, verb: str) -> None:
        self._console, self._verb = console, verb
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(
            *columns, TextColumn("{task.fields[told]}", markup=False), console=console, transient=True
        )
        self._task = self._progress.add_task(verb, total=None, told="")
        self._told = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def report(self, made: JobProgress) -> None:
        told = f"{length(made.audio_s)} of audio"
        if made.eta_s is not None and made.parts < made.total:
            told += f", {length(made.eta_s)} left"
        self._show(made.parts, made.total, told, made.remark)

    def counted(self, total: int) -> Callable[[int], None]:
        """Return a callback that reports only the number of completed steps."""
        return lambda done: self._show(done, total, "", "")

    def _show(self, done: int, total: int, told: str, remark: str) -> None:
        told = f"{told} ({remark})" if remark else told
        self._progress.update(self._task, completed=done, total=total, told=told)
        if self._console.is_terminal:
            return
        tenth = f"{_TENTHS * done // max(1, total)}{remark}"
        if tenth != self._told:
            self._console.print(f"{self._verb}: {done} of {total} parts{', ' * bool(told)}{told}", markup=False)
        self._told = tenth


@contextlib.contextmanager
def stopped(console: Console, remedy: str) -> Iterator[None]:
    """On Ctrl-C, print `remedy` and exit with the usual status for an interrupted program."""
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"stopped: {remedy}", markup=False)
        sys.exit(128 + signal.SIGINT)


def length(seconds: float) -> str:
    """Format a duration as `1:02:03` or `2:03`."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
