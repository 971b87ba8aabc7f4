"""The replicas that `serve deploy` with another configuration replaces: `talkray upgrade-check OLD NEW`.

Ray Serve 2.60 replaces every replica of an application whose `args`, `import_path`, `runtime_env` or policies changed,
whatever the change is. It replaces the replicas of one deployment if its resources changed, and none if only its size,
bounds or limits changed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_app.config import AppConfig, read_config

_OF_ALL = ("import_path", "runtime_env", "args", "autoscaling_policy")
_OF_ALL_BELOW = ("request_router_config", "deployment_actors")  # under `deployments`
_OF_ONE = (
    "ray_actor_options",
    "placement_group_bundles",
    "placement_group_strategy",
    "placement_group_bundle_label_selector",
    "placement_group_fallback_strategy",
    "max_replicas_per_node",
    "gang_scheduling_config",
)
_OF_SERVE = ("proxy_location", "http_options", "grpc_options")  # read when Serve starts


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that differs, and the pools whose replicas are replaced for it; empty: none."""

    setting: str
    before: object
    after: object
    replaces: str = ""
    remark: str = ""

    def line(self) -> str:
        change = f"{self.setting}: {_shown(self.before)} -> {_shown(self.after)}"
        return f"{change}\n    {f'replaces {self.replaces}' if self.replaces else f'replaces no replica{self.remark}'}"


def upgrade_changes(old: Path, new: Path) -> list[Change]:
    """Differences between two Serve config files, in the order of the files. Raises ConfigError."""
    ours, theirs = read_config(old), read_config(new)
    before, after = (yaml.safe_load(file.read_text(encoding="utf-8")) or {} for file in (old, new))
    talkers = [f"Talker-{name}" if name else "Talker" for name in theirs.by_model()]
    everybody = f"every replica: those of {', '.join(['Ingress', 'Jobs', 'Codec', *talkers])}{_warning(ours, theirs)}"
    return [*_of_serve(before, after), *_of_application(_application(before), _application(after), everybody)]


def _application(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The application's part of a config file; a file that contains only settings becomes its `args`."""
    applications = document.get("applications")
    return dict(applications[0]) if applications else {"args": document}


def _of_serve(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    remark = ", and `serve deploy` does not change it: end Serve and start it again"
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
            remark = f": {name} alone starts or ends some, or is told" if not replaces else ""
            if kind != "name":
                yield Change(f"{name}: {setting}", old, new, replaces=replaces, remark=remark)


def _warning(ours: AppConfig, theirs: AppConfig) -> str:
    """Why the change must not be deployed in place, where replicas of both configurations talk to each other."""
    new = theirs.by_model()
    both = [(own, new[name]) for name, own in ours.by_model().items() if name in new]
    if any(old.model != own.model for old, own in both):
        return ". Another checkpoint: do not deploy it in place, where a stream may go on in another voice"
    if any(old.codec.placement != "pool" == own.codec.placement and own.talker_pool.num_gpus for old, own in both):
        return (
            ". codec.placement: pool: do not deploy it in place, where old replicas ask new talkers for audio, which"
            " have loaded no codec decoder"
        )
    return ""


def _different(where: str, before: Any, after: Any) -> Iterator[tuple[str, object, object]]:
    """The settings below `where` that differ, each with its two values."""
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
