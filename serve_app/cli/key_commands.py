"""`talkray key`: manages API keys in a file that running servers watch."""

from pathlib import Path
from typing import Annotated

import typer

from deployments.errors import StartError
from loadtest.command_app import CommandApp
from serve_app.api.access.keys import KeyRecord, read_keys
from serve_app.cli.key_file import create_key, limit_keys, revoke_keys

keys = CommandApp("Create, list, limit and revoke API keys. Running servers apply changes immediately.")
_KEY_FILE = "~/.config/talkray/keys.json"


def _default_key_file() -> Path:
    try:
        return Path(_KEY_FILE).expanduser()
    except RuntimeError:
        raise StartError("this user has no home folder: set HOME, or select the key file with --file") from None


KeyFile = Annotated[
    Path,
    typer.Option(
        "--file",
        envvar="TALKRAY_KEYS_FILE",
        help="Key file.",
        default_factory=_default_key_file,
        show_default=_KEY_FILE,
    ),
]


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of the owner.")],
    file: KeyFile,
    requests_per_minute: Annotated[int | None, typer.Option(help="Rate limit of each ingress replica.", min=1)] = None,
    max_streams: Annotated[
        int | None, typer.Option(help="Maximum number of streams at each ingress replica.", min=1)
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="Allow access to the voices, jobs and usage metrics of all owners.")
    ] = False,
) -> None:
    """Create a key and print it. The key is shown only once, because the file stores its hash."""
    print(create_key(file, name, requests_per_minute=requests_per_minute, max_streams=max_streams, admin=admin))


@keys.command("list")
def list_keys(file: KeyFile) -> None:
    """List the id, name, limits and state of each key."""
    for record in read_keys(file).keys:
        print(_key_line(record))


@keys.command()
def limit(
    id_or_name: Annotated[str, typer.Argument(help="Id or name of a key.")],
    file: KeyFile,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="New rate limit of each ingress replica; 0 removes it.", min=0)
    ] = None,
    max_streams: Annotated[
        int | None, typer.Option(help="New maximum number of streams at each ingress replica; 0 removes it.", min=0)
    ] = None,
) -> None:
    """Change the limits of one key by its id, or of all keys with a name. Options that you omit keep their limits.

    The file keeps its owner and mode.
    """
    asked = {"requests_per_minute": requests_per_minute, "max_streams": max_streams}
    limits = {name: value or None for name, value in asked.items() if value is not None}
    for record in limit_keys(file, id_or_name, limits):
        print(_key_line(record))


@keys.command()
def revoke(id_or_name: Annotated[str, typer.Argument(help="Id or name of a key.")], file: KeyFile) -> None:
    """Revoke one key by its id, or all keys with a name."""
    for record in revoke_keys(file, id_or_name):
        print(f"revoked {record.id} ({record.name})")


def _key_line(record: KeyRecord) -> str:
    state = f"revoked {record.revoked}" if record.revoked else f"since {record.created}"
    name = f"{record.name} (admin)" if record.admin else record.name
    return (
        f"{record.id}  {name:<20}{_limit(record.requests_per_minute):>6} requests/min"
        f"{_limit(record.max_streams):>6} streams  {state}"
    )


def _limit(limit: int | None) -> str:
    return "any" if limit is None else str(limit)
