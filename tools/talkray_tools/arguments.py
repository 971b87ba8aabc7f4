"""Arguments that several commands take."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from deployments.errors import CheckpointError
from deployments.weights.store import locate


def checkpoint(name: str) -> Path:
    """Its directory, as of `talkray serve --model`; a download says how far it is. For argparse's `type`."""
    try:
        return locate(name, report=_say)
    except CheckpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run_command(command: Callable[..., None], name: str, arguments: Sequence[str]) -> int:
    """Run it as `talkray` runs its own commands, called `name` in its help; returns the exit code."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app(arguments, prog_name=name)
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return end.code or 0
    return 0


def _say(transfer: object) -> None:
    sys.stderr.write(f"{transfer}\n")
