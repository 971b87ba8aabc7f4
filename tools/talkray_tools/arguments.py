"""Command-line arguments shared by several commands."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deployments.errors import CheckpointError, TalkrayError
from deployments.weights.store import locate
from loadtest.command_app import CommandApp


def checkpoint(name: str) -> Path:
    """Resolve a `--model` value to a checkpoint directory, showing progress if it is downloaded. Used by argparse."""
    try:
        return locate(name, report=_say)
    except CheckpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class CommandParser(argparse.ArgumentParser):
    """Argument parser that formats help and errors like the Typer commands."""

    def print_help(self, file: Any = None) -> None:
        console = Console(file=file, highlight=False)
        console.print(f"\n Usage: {self._usage_line()}\n", markup=False)
        console.print(
            Padding(
                Text("\n\n".join(" ".join(each.split()) for each in (self.description or "").split("\n\n"))),
                (0, 1, 1, 1),
            )
        )
        for title, is_option in (("Arguments", False), ("Options", True)):
            rows = [each for each in self._actions if bool(each.option_strings) is is_option]
            if rows:
                _show_panel(console, title, rows)

    def error(self, message: str) -> NoReturn:
        console = Console(stderr=True, highlight=False)
        console.print(f"Usage: {self._usage_line()}\nTry '{self.prog} --help' for help.", markup=False)
        console.print(Panel(Text(message), title="Error", title_align="left", border_style="red"))
        self.exit(2)

    def _usage_line(self) -> str:
        return " ".join([self.prog, "[OPTIONS]", *(each.dest for each in self._actions if not each.option_strings)])


def _show_panel(console: Console, title: str, actions: Sequence[argparse.Action]) -> None:
    table = Table.grid(padding=(0, 2))
    for each in actions:
        name = ", ".join(reversed(each.option_strings)) or each.dest
        kind = "" if each.nargs == 0 else str(each.metavar or getattr(each.type, "__name__", "str")).lower()
        values = f"<{'|'.join(map(str, each.choices)) if each.choices else kind}>" if each.nargs != 0 else ""
        values += " ..." if each.nargs in ("+", "*") else ""
        is_told = each.default not in (None, False, [], argparse.SUPPRESS)
        default = " ".join(map(str, each.default)) if isinstance(each.default, list) else each.default
        told = f"{each.help or ''} [default: {default}]" if is_told else each.help or ""
        table.add_row(Text(name, "bold cyan"), Text(values, "bold yellow"), Text(told.strip()))
    console.print(Panel(table, title=title, title_align="left", border_style="dim"))


def run_command(command: Callable[..., None], name: str, arguments: Sequence[str]) -> int:
    """Run `command` under the program name `name`, like `talkray`'s own commands, and return the exit code."""
    app = CommandApp()
    app.command()(command)
    try:
        app(arguments, prog_name=name)
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return end.code or 0
    return 0


def run_program(command: Callable[..., None], name: str) -> NoReturn:
    """Run `command` with this process's arguments, then exit. Talkray's own errors are printed without a traceback."""
    try:
        sys.exit(run_command(command, name, sys.argv[1:]))
    except TalkrayError as error:
        sys.exit(f"talkray: {error}")


def _say(transfer: object) -> None:
    sys.stderr.write(f"{transfer}\n")
