from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, Mock, patch

import pytest
import yaml

from deployments.errors import Starting
from serve_app import ingress
from serve_app.api.request_record import RequestRecord
from serve_app.config import ApiSettings, ConfigError
from serve_app.config_file import read_config
from serve_app.extensions.jobs import deployment as jobs
from serve_app.extensions.jobs.extension import open_client
from serve_app.speech.model_state import ModelStatus


@pytest.mark.parametrize(("module", "replica"), [(ingress, ingress.Ingress), (jobs, jobs.JobsReplica)])
def test_a_replica_that_ends_writes_its_last_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, replica: Any
) -> None:
    monkeypatch.setenv("TALKRAY_DATA", str(tmp_path / "data"))
    lines = tmp_path / "lines"
    node = Mock(proxy_host=lambda: "127.0.0.1", log_folder=lambda: lines, replica_name=lambda: "1", num_nodes=lambda: 1)
    given = list[Any]()
    for name in {"ray_metrics", "serve", "PoolWatch", "JobManager", "SpeechModels", "get_node_ip_address"} & vars(
        module
    ).keys():
        monkeypatch.setattr(module, name, MagicMock())
    for each in {ingress, module}:
        monkeypatch.setattr(each, "ray_private", node)
    monkeypatch.setattr(jobs, "SegmentMaker", lambda *some: given.extend(some))
    ending = replica(ApiSettings(), (), {})
    receive = given[-1] if given else ending._api.state.opened["records"].receive
    receive(RequestRecord("the last one", 0))
    if module is jobs:
        wired, module.PoolWatch().state().status = module.JobManager.call_args.kwargs, ModelStatus.AT_ZERO
        assert wired["dead_nodes"] is node.num_dead_nodes
        assert "has no talkers" in wired["hindrance"]("model")
    ending.__del__()  # as Serve does
    [file] = lines.iterdir()
    assert "the last one" in file.read_text()


@pytest.mark.parametrize(
    "application",
    [
        {"args": {}, "deployments": [{"name": "Jobs", "num_replicas": 2}]},
        {"args": {"api": {"jobs": {"pool": {"replicas": 2}}}}},
    ],
)
def test_more_than_one_replica_is_refused(tmp_path: Path, application: dict[str, object]) -> None:
    (file := tmp_path / "a.yaml").write_text(yaml.safe_dump({"applications": [application]}))
    with pytest.raises(ConfigError, match=r"api.jobs: .*exactly one replica"):
        read_config(file)


@pytest.mark.anyio
async def test_creating_a_job_may_take_two_minutes_and_other_calls_ten_seconds() -> None:
    with (
        patch("deployments.serving.handles.call_replica", Mock()),
        patch("asyncio.wait_for", side_effect=TimeoutError) as limited,
    ):
        ask = open_client(Mock())
        assert ask is not None
        for method in ("create", "ask"):
            with pytest.raises(Starting, match="does not respond yet"):
                await ask(method)
    assert [call.args[1] for call in limited.call_args_list] == [120.0, 10.0]
