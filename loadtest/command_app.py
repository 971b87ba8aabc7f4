"""Help for all `talkray` commands: accepts `-h`, hides the types of switches, and lists commands by panel."""

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

Command = TypeVar("Command", bound=Callable[..., Any])


def _without_types_of_switches(params: Any) -> Any:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _without_types_of_switches(super().get_params(ctx))


class _Group(TyperGroup):
    panels: tuple[str, ...] = ()

    def get_params(self, ctx: Any) -> Any:
        return _without_types_of_switches(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        panels = [getattr(self.commands[name], "rich_help_panel", None) for name in names]
        order = {panel: place for place, panel in enumerate(dict.fromkeys((*self.panels, *panels)))}
        return sorted(names, key=lambda name: order[panels[names.index(name)]])


class CommandApp(typer.Typer):
    """Typer app that lists its commands in the order of `panels`, their `rich_help_panel` values."""

    def __init__(self, text: str | None = None, *, panels: tuple[str, ...] = ()) -> None:
        super().__init__(
            cls=type("_PanelGroup", (_Group,), {"panels": panels}),
            help=text,
            no_args_is_help=bool(text),
            add_completion=False,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
        )

    def command(self, name: str | None = None, **options: Any) -> Callable[[Command], Command]:
        return super().command(name, **{"cls": _Command} | options)
