"""Load built-in and custom extensions. See `Dialect` for why their order matters.

Each name in BUILT_IN is a folder of this package whose `extension.py` declares an `EXTENSION`. A process imports only
the extensions that it loads. COMMANDS maps each command group to its help text, its Typer app and the modules that add
commands to it. The command line imports them when a user calls one of its commands.
"""

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from deployments.errors import StartError

if TYPE_CHECKING:  # avoids an import cycle, because the settings import this module
    from serve_app.extension import Extension

_FOLDER, _DEFAULT = "serve_app.extensions", "default"
BUILT_IN = (
    "text",
    "deepgram",
    "elevenlabs",
    "cartesia",
    "realtime",
    "dashscope",
    "designs",  # before voices, because its routes would match `design` as a voice name
    "voices",
    "other_servers",
    "native",
    "jobs",
    "models",
    "word_times",
    "continuity",
    "live",
    "records",
    "access_tokens",
    "page",
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "voice": (
        "Check recordings, and manage stored voices.",
        "serve_app.extensions.voices.voice_commands:voices",
        "serve_app.extensions.designs.design_commands",  # adds commands
    ),
    "lexicon": ("Edit the server's lexicon.", "serve_app.extensions.voices.voice_commands:lexicon"),
}


def command_group(name: str) -> Any:
    """Return the app of a command in COMMANDS, with the commands that further modules add."""
    _, app, *more = COMMANDS[name]
    for module in more:
        resolve_name(module)
    return resolve_name(app)


def load_extensions(selected: Sequence[str] | None = None) -> "tuple[Extension, ...]":
    """Return the extensions that `api.extensions` selects, in the same order. The default is all built-in extensions.

    Raises StartError if a name is unknown or repeated, if an import fails, or if a required extension is missing.
    """
    listed = (_DEFAULT,) if selected is None else selected
    names = [each for name in listed for each in (BUILT_IN if name == _DEFAULT else (name,))]
    extensions = tuple(map(_load, names))
    loaded = [extension.name for extension in extensions]
    if repeated := next((name for name in loaded if loaded.count(name) > 1), None):
        raise StartError(f"api.extensions: {repeated!r} is listed twice. Delete one of the entries")
    for extension in extensions:
        if missing := [name for name in _required(extension) if name not in loaded]:
            raise StartError(f"api.extensions: {extension.name} requires {', '.join(missing)}. Add them to the list")
    return extensions


def _required(extension: "Extension") -> list[str]:
    """Return the names of all extensions that this one requires, directly or indirectly."""
    names: dict[str, None] = {}
    for name in extension.requires:
        names |= dict.fromkeys((*(_required(_load(name)) if name in BUILT_IN else ()), name))
    return list(names)


def _load(name: str) -> "Extension":
    if name in BUILT_IN:
        extension: Extension = resolve_name(f"{_FOLDER}.{name}.extension:EXTENSION")
        return extension
    if not name.partition(":")[2]:
        known = ", ".join((_DEFAULT, *BUILT_IN))
        raise StartError(f"api.extensions: {name!r} is unknown. Use {known}, or your own package.module:EXTENSION")
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise StartError(
            f"api.extensions: {name!r} cannot be imported ({error}). Install the package on every node that builds the "
            "application or runs an ingress replica"
        ) from None
    kind = resolve_name("serve_app.extension:Extension")  # a lazy import, because its settings import this module
    if isinstance(found, kind):
        own: Extension = found
        return own
    raise StartError(f"api.extensions: {name!r} is a {type(found).__name__}. Name an instance of Extension")
