"""Version and requirements of this installation or checkout."""

import importlib.metadata
import re
import shlex
import tomllib
from functools import cache
from itertools import chain
from pathlib import Path

_PROJECT = Path(__file__).parents[1] / "pyproject.toml"
_PARTS = re.compile(r"([\w.-]+)(\[[^]]*\])?\s*([^;]*)")


@cache
def _own() -> tuple[str, list[str]]:
    """Return the version and all requirements. A checkout takes precedence over an installation, as its code runs."""
    if not _PROJECT.exists():
        return importlib.metadata.version("talkray"), importlib.metadata.requires("talkray") or []
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
    return project["version"], [*project["dependencies"], *chain(*project["optional-dependencies"].values())]


def version() -> str:
    """Return the version of Talkray."""
    return _own()[0]


def pip_install(*packages: str) -> str:
    """Return the pip command that installs `packages` within Talkray's version bounds. Talkray itself is not on any
    package index, so another project could register its name there.
    """
    bounds: dict[str, str] = {}
    for requirement in _own()[1]:
        if parts := _PARTS.match(requirement):
            name, extras, limits = parts.groups(default="")
            joined = ",".join(sorted(limits.strip(" ()").split(","), reverse=True))  # as written: lower bound first
            bounds.setdefault(name, name + extras + joined)
    return shlex.join(["pip", "install", *(bounds[package.replace("_", "-")] for package in packages)])
