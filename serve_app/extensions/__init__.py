"""The built-in extensions, and the loader of all extensions. `Dialect` describes the effect of their order.

Each name is a folder here, whose `extension.py` declares an `EXTENSION`. A process imports only those that it loads.
COMMANDS are groups of the command line: the help, and the Typer app that is imported when one of them is called.
"""

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from deployments.errors import StartError

if TYPE_CHECKING:  # the settings import this module
    from serve_app.extension import Extension

_FOLDER, _DEFAULT = "serve_app.extensions", "default"
BUILT_IN = (
    "text",
    "deepgram",
    "elevenlabs",
    "cartesia",
    "realtime",
    "dashscope",
    "designs",  # before voices, which would take `design` as the name of a voice
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
COMMANDS = {
    "voice": (
        "Check recordings, and manage stored voices.",
        "serve_app.extensions.designs.design_commands:voices",
    ),
    "lexicon": ("Edit the server's lexicon.", "serve_app.extensions.voices.voice_commands:lexicon"),
}


def load_extensions(selected: Sequence[str] | None = None) -> "tuple[Extension, ...]":
    """The extensions that `api.extensions` selects, in its order; all built-in ones if it is unset.

    Raises StartError for an unknown or repeated name, for one that cannot be imported, and for a missing requirement.
    """
    listed = (_DEFAULT,) if selected is None else selected
    names = [each for name in listed for each in (BUILT_IN if name == _DEFAULT else (name,))]
    extensions = tuple(map(_load, names))
    loaded = [extension.name for extension in extensions]
    if repeated := next((name for name in loaded if loaded.count(name) > 1), None):
        raise StartError(f"api.extensions: {repeated!r} is listed twice: delete one of them")
    for extension in extensions:
        if missing := [name for name in _required(extension) if name not in loaded]:
            raise StartError(f"api.extensions: {extension.name} requires {', '.join(missing)}: add them to the list")
    return extensions


def _required(extension: "Extension") -> list[str]:
    """Names of the extensions that it requires, and of those that these require."""
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
        raise StartError(f"api.extensions: {name!r} is unknown. Use {known}, or package.module:EXTENSION of your own")
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise StartError(
            f"api.extensions: {name!r} cannot be imported ({error}): the package must be installed on every node that "
            "builds the application or runs an ingress replica"
        ) from None
    kind = resolve_name("serve_app.extension:Extension")  # it imports the settings, and they import this module
    if isinstance(found, kind):
        own: Extension = found
        return own
    raise StartError(f"api.extensions: {name!r} is a {type(found).__name__}: name an object of the class Extension")
