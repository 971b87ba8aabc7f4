"""`talkray upgrade-check OLD NEW`: lists the replicas that `serve deploy` replaces for another configuration.

If `args`, `import_path`, `runtime_env` or policies change, Ray Serve 2.60 replaces every replica of the application,
however small the change. If the resources of one deployment change, it replaces that deployment's replicas. If only
sizes, bounds or limits change, no replicas are replaced.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_app.config import AppConfig
from serve_app.config_file import read_config

_OF_ALL = ("import_path", "runtime_env", "args", "autoscaling_policy")
_OF_ALL_BELOW = ("request_router_config", "deployment_actors")  # keys under `deployments`
_OF_ONE = (
    "ray_actor_options",
    "placement_group_bundles",
    "placement_group_strategy",
    "placement_group_bundle_label_selector",
    "placement_group_fallback_strategy",
    "max_replicas_per_node",
    "gang_scheduling_config",
)
_OF_SERVE = ("proxy_location", "http_options", "grpc_options")  # Serve reads these keys only at startup


@dataclass(frozen=True, slots=True)
class Change:
    """Changed setting, and the pools whose replicas it replaces. Empty: no replicas are replaced."""

    setting: str
    before: object
    after: object
    replaces: str = ""
    remark: str = ""

    def line(self) -> str:
        change = f"{self.setting}: {_shown(self.before)} -> {_shown(self.after)}"
        return f"{change}\n    {f'replaces {self.replaces}' if self.replaces else f'replaces no replicas{self.remark}'}"


def upgrade_changes(old: Path, new: Path) -> list[Change]:
    """Return the differences between two Serve config files, in the order of the files. Raises ConfigError."""
    ours, theirs = read_config(old), read_config(new)
    before, after = (yaml.safe_load(file.read_text(encoding="utf-8")) or {} for file in (old, new))
    talkers = [f"Talker-{name}" if name else "Talker" for name in theirs.by_model()]
    everybody = f"every replica: those of {', '.join(['Ingress', 'Jobs', 'Codec', *talkers])}{_warning(ours, theirs)}"
    return [*_of_serve(before, after), *_of_application(_application(before), _application(after), everybody)]


def _application(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the application's part of a config file. A file that contains only settings is returned as `args`."""
    applications = document.get("applications")
    return dict(applications[0]) if applications else {"args": document}


def _of_serve(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    remark = ", but `serve deploy` does not apply it: restart Serve"
    for name in _OF_SERVE:
        for setting, old, new in _different(name, before.get(name), after.get(name)):
            yield Change(setting, old, new, remark=remark)


def _of_application(before: Mapping[str, Any], after: Mapping[str, Any], everybody: str) -> Iterator[Change]:
    for name in _OF_ALL:
        for setting, old, new in _different(name, before.get(name), after.get(name)):
            yield Change(setting, old, new, replaces=everybody)
    ours, theirs = ({each["name"]: each for each in app.get("deployments") or ()} for app in (before, after))
    for name in {**ours, **theirs}:
        for setting, old, new in _different("", ours.get(name, {}), theirs.get(name, {})):
            kind = setting.partition(".")[0]
            of_all = kind in _OF_ALL_BELOW or setting.startswith("autoscaling_config.policy")
            replaces = everybody if of_all else f"the replicas of {name}" if kind in _OF_ONE else ""
            remark = f": only {name} starts or stops replicas, or gets the new value" if not replaces else ""
            if kind != "name":
                yield Change(f"{name}: {setting}", old, new, replaces=replaces, remark=remark)


def _warning(ours: AppConfig, theirs: AppConfig) -> str:
    """Return why replicas of the old and new configurations must not run side by side, or an empty string."""
    new = theirs.by_model()
    both = [(own, new[name]) for name, own in ours.by_model().items() if name in new]
    if any(old.model != own.model for old, own in both):
        return ". The checkpoint changes: do not deploy in place, because a stream may continue in another voice"
    if any(old.codec.placement != "pool" == own.codec.placement and own.talker_pool.num_gpus for old, own in both):
        return (
            ". codec.placement becomes pool: do not deploy in place, because old replicas request audio from talkers"
            " without a codec decoder"
        )
    return ""


def _different(where: str, before: Any, after: Any) -> Iterator[tuple[str, object, object]]:
    """Yield the settings under `where` that differ, each with both values."""
    if before == after:
        return
    inner = _inner(before), _inner(after)
    changes = [
        each
        for name in {**inner[0], **inner[1]}
        for each in _different(f"{where}.{name}".lstrip("."), inner[0].get(name), inner[1].get(name))
    ]
    yield from changes or [(where, before, after)]


def _inner(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _shown(value: object) -> str:
    return "not set" if value is None else yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
