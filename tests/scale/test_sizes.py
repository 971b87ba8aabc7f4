"""A pool's bounds change under `deployments` while nobody's replicas are replaced."""

import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from serve_app.cli.serve.local_server import APP_NAME
from tools.suites.application import running
from tools.suites.pools import CODEC, TALKER, Service, config, tiny_model
from tools.suites.processes import MARK

INGRESS = "Ingress"
BOUND_S = 120


def sized(args: dict[str, Any], **fewest: int) -> None:
    """Deploys as `serve deploy` does with the shipped file, whose policies are its own, and with these bounds."""
    shipped = yaml.safe_load((Path(__file__).parents[2] / "cluster/serve/production.yaml").read_text(encoding="utf-8"))
    deployments = shipped["applications"][0]["deployments"]
    for each in deployments:
        if each["name"] == INGRESS:
            each["num_replicas"] = 1
        else:
            low = fewest[each["name"]]
            each["autoscaling_config"] |= {"min_replicas": low, "initial_replicas": low, "max_replicas": 3}
    application = {"name": APP_NAME, "route_prefix": "/", "import_path": "serve_app.app:build_app"}
    schema = {"applications": [{**application, "args": args, "deployments": deployments}]}
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(schema))


def wait_until_there_are(service: Service, **replicas: int) -> None:
    until_s = time.monotonic() + BOUND_S
    while {name: service.num_running(name) for name in replicas} != replicas or any(
        len(service.processes(name)) != count for name, count in replicas.items()
    ):
        assert time.monotonic() < until_s, {name: service.num_running(name) for name in replicas}
        time.sleep(0.1)


def test_another_bound_starts_a_replica_and_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    app = config(tiny_model(tmp_path / "model"), talkers=1, codecs=1)
    with running(app) as url:
        service, args = Service(url, mark, app), app.model_dump(mode="json")
        replaced = service.processes(TALKER)
        sized(args, Talker=1, Codec=1)
        service.replaces(replaced, TALKER, -1)  # the first file has other policies
        wait_until_there_are(service, Talker=1, Codec=1, Ingress=1)
        before = {name: set(service.processes(name)) for name in (TALKER, CODEC, INGRESS)}
        sized(args, Talker=1, Codec=2)
        wait_until_there_are(service, Talker=1, Codec=2, Ingress=1)
        sized(args, Talker=2, Codec=2)
        wait_until_there_are(service, Talker=2, Codec=2, Ingress=1)
        for name, replicas in before.items():
            assert replicas <= set(service.processes(name)), f"{name} was replaced"
