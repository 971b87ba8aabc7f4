"""What a new configuration replaces, and that this is what Ray Serve does."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.build_app import build_app as build
from ray.serve._private.config import ReplicaConfig
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.version import DeploymentVersion
from ray.serve.schema import ServeApplicationSchema

from serve_app.app import build_app
from serve_app.cli.upgrade_check import upgrade_changes
from serve_app.config import AppConfig
from serve_app.config_file import read_config
from serve_app.scaling.policies import CodecPolicy, TalkerPolicy

PRODUCTION = Path(__file__).parents[3] / "cluster" / "serve" / "production.yaml"
SIZES = [
    ("Ingress", "num_replicas", 4),
    ("Talker", "autoscaling_config.max_replicas", 32),
    ("Talker", "autoscaling_config.min_replicas", 2),
    ("Codec", "autoscaling_config.initial_replicas", 20),
    ("Codec", "max_ongoing_requests", 20),
]


def production() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(PRODUCTION.read_text(encoding="utf-8"))
    document["applications"][0]["args"]["model"] = "embedded"
    return document


def changed(name: str, setting: str, value: object) -> dict[str, Any]:
    document = production()
    [own] = [each for each in document["applications"][0]["deployments"] if each["name"] == name]
    *path, last = setting.split(".")
    for part in path:
        own = own.setdefault(part, {})
    own[last] = value
    return document


def code_version(document: dict[str, Any]) -> str:
    return get_app_code_version(ServeApplicationSchema.model_validate(document["applications"][0]))


def deployed(document: dict[str, Any]) -> dict[str, Any]:
    """The deployments as Serve's controller has them, by name, without what they are built of."""
    schema = ServeApplicationSchema.model_validate(copy.deepcopy(document["applications"][0]))
    application = build(build_app(AppConfig.model_validate(schema.args)), name="talkray")
    infos = {
        each.name: DeploymentInfo(
            deployment_config=each._deployment_config,
            replica_config=ReplicaConfig.create(object, ray_actor_options=each.ray_actor_options),
            start_time_ms=0,
            deployer_job_id="",
            version=code_version(document),
        )
        for each in application.deployments
    }
    return dict(override_deployment_info(infos, schema))


@pytest.fixture
def ask(tmp_path: Path) -> Any:
    def changes(new: dict[str, Any]) -> list[Any]:
        old, other = tmp_path / "old.yaml", tmp_path / "new.yaml"
        old.write_text(yaml.safe_dump(production()), encoding="utf-8")
        other.write_text(yaml.safe_dump(new), encoding="utf-8")
        return upgrade_changes(old, other)

    return changes


@pytest.mark.parametrize(("name", "setting", "value"), SIZES)
def test_a_size_replaces_nobody(ask: Any, name: str, setting: str, value: object) -> None:
    new = changed(name, setting, value)
    [change] = ask(new)
    assert (change.setting, change.replaces) == (f"{name}: {setting}", "")
    assert f"only {name}" in change.line()
    assert code_version(new) == code_version(production())


def test_our_deployments_are_equal_for_two_sizes() -> None:
    """Whatever Serve compares of each, its version among it, while the number of replicas follows the file."""
    before, after = deployed(production()), deployed(changed("Talker", "autoscaling_config.max_replicas", 32))
    for name in before:
        old, new = (
            DeploymentVersion(info.version, info.deployment_config, info.replica_config.ray_actor_options)
            for info in (before[name], after[name])
        )
        assert not old.requires_actor_restart(new)
    assert before["Talker"].deployment_config.autoscaling_config.max_replicas == 16
    assert after["Talker"].deployment_config.autoscaling_config.max_replicas == 32


def test_serve_takes_sizes_policies_and_limits_from_the_file() -> None:
    found = {name: info.deployment_config for name, info in deployed(production()).items()}
    assert found["Ingress"].num_replicas == 2
    for name, policy, bounds in (("Talker", TalkerPolicy, (1, 2, 16)), ("Codec", CodecPolicy, (8, 16, 256))):
        scaling = found[name].autoscaling_config
        assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == bounds
        assert scaling.policy.get_policy().__name__ == policy.__name__
        scaling.policy.get_policy()(**scaling.policy.policy_kwargs)
        assert (scaling.metrics_interval_s, scaling.upscale_delay_s, scaling.downscale_delay_s) == (0.5, 0, 0)
    assert found["Codec"].max_ongoing_requests == read_config(PRODUCTION).codec_requests == 12


@pytest.mark.parametrize(
    "change",
    [
        lambda app: app["args"].update(model="Qwen/Qwen3-TTS-12Hz-0.6B-Base"),
        lambda app: app["args"]["api"].update(server_timing=True),
        lambda app: app["args"].update(codec={}),
        lambda app: app.update(runtime_env={"env_vars": {"A": "b"}}),
        lambda app: app["deployments"][1]["autoscaling_config"]["policy"]["policy_kwargs"].update(target_use=0.5),
        lambda app: app["deployments"].pop(2),
    ],
)
def test_what_changes_serves_version_replaces_everybody(ask: Any, change: Any) -> None:
    new = production()
    change(new["applications"][0])
    assert code_version(new) != code_version(production())
    assert "every replica: those of Ingress, Jobs, Codec, Talker" in " ".join(each.replaces for each in ask(new))


def test_resources_replace_the_replicas_of_one_pool(ask: Any) -> None:
    new = changed("Codec", "ray_actor_options.num_cpus", 4)
    [change] = ask(new)
    assert change.replaces == "the replicas of Codec"
    assert code_version(new) == code_version(production())
