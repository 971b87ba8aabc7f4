"""Reads a file of settings, and explains its errors."""

import copy
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from serve_app.config import POOLS, ApiSettings, AppConfig, ConfigError, settings_kinds


def read_config(file: Path) -> AppConfig:
    """Read the application's settings from a Serve config file (`applications[0]`: its `args`, and the sizes and bounds
    under `deployments`) or from a separate file of settings.

    Raises ConfigError, which lists unknown keys and the valid keys.
    """
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    applications = document.get("applications") if isinstance(document, dict) else None
    try:
        return AppConfig.model_validate(_with_sizes(applications[0]) if applications else document)
    except ValidationError as error:
        raise ConfigError(f"{file}: {explain(error)}") from None


def _with_sizes(application: Mapping[str, Any]) -> dict[str, Any]:
    """Return `args` with the sizes, bounds and policies that Serve reads under `deployments`. Raises ConfigError."""
    args = copy.deepcopy(application.get("args") or {})
    for entry in application.get("deployments") or ():
        kind, _, model = str(entry.get("name")).partition("-")
        served = next((served for served in args.get("models") or () if served.get("name") == model), None)
        if kind not in POOLS or (model and (kind != "Talker" or served is None)):
            raise ConfigError(f"deployments: {entry.get('name')!r} is not a pool with its own size")
        own: dict[str, Any] = args if served is None else served
        scaling = entry.get("autoscaling_config")
        size = entry.get("num_replicas") if scaling is None else scaling.get("initial_replicas")
        if size and kind == "Jobs":
            jobs = args.setdefault("api", {}).setdefault("jobs", {})
            jobs["pool"] = {**(jobs.get("pool") or {}), "replicas": size}
        elif size:
            pool = f"{POOLS[kind]}_pool"
            own[pool] = {**(args.get(pool) or {}), **(own.get(pool) or {}), "replicas": size}
        if scaling is not None:
            own[f"{POOLS[kind]}_scaling"] = {**(own.get(f"{POOLS[kind]}_scaling") or {}), **_bounds(scaling)}
    return args


def _bounds(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an `autoscaling_config` to Talkray's setting names. Arguments that follow from other settings are
    dropped.
    """
    policy = (scaling.get("policy") or {}).get("policy_kwargs") or {}
    own = {name: value for name, value in policy.items() if name not in ("sequences_per_replica", "max_talker_streams")}
    return {**own, "min_replicas": scaling.get("min_replicas", 1), "max_replicas": scaling.get("max_replicas", 1)}


def explain(error: ValidationError) -> str:
    """Describe each problem of the settings in one line, with the valid keys if a key is unknown."""
    lines = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"])
        keys = _valid_keys(problem["loc"][:-1]) if problem["type"] == "extra_forbidden" else ()
        hint = f"; valid keys: {', '.join(keys)}" if keys else ""
        lines.append(f"{where}: {problem['msg']}{hint}")
    return "\n".join(lines)


def _valid_keys(path: tuple[int | str, ...]) -> list[str]:
    model: Any = AppConfig
    for part in path:
        if not isinstance(part, str):
            model = get_args(model)[0]  # list of settings
        elif part in model.model_fields:
            model = model.model_fields[part].annotation
        else:
            model = settings_kinds(None)[part]
        if isinstance(model, UnionType):  # optional settings
            model = next(member for member in get_args(model) if member is not NoneType)
    return sorted((*model.model_fields, *(settings_kinds(None) if model is ApiSettings else ())))
