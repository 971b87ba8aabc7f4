import os
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from deployments.errors import StartError
from serve_app.cli.ray_settings import free_port
from serve_app.cli.serve import local_server
from serve_app.cli.serve.local_server import Address, first_page, logical_cpus, root_cause, why_unusable
from serve_app.cli.serve.run_folder import RunFolder
from serve_app.config import POOLS, AppConfig
from tests.loadtest.servers import QuietHandler
from tests.loadtest.servers import running as serving
from tools.suites.application import running

QUOTED = """A replica failed to start with exception. Retrying 2 more time(s). Error:
\x1b[36mray::ServeReplica:talkray:Talker.initialize_and_get_metadata()\x1b[39m (pid=1, ip=192.0.2.2)
  File "replica.py", line 1928, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "engine_client.py", line 105, in _await_ready
    raise report.error
deployments.errors.CheckpointError: /m/model.safetensors does not fit: a is missing;
b is missing"""


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_whether_an_address_can_be_used(listener: int) -> None:
    assert why_unusable("127.0.0.1", free_port()) is None
    assert why_unusable("127.0.0.1", listener) == "Address already in use"
    assert why_unusable("nowhere.invalid", 8000) is not None
    assert Address("::1", 8000).url == "http://[::1]:8000"
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        assert why_unusable("::1", port) == "Address already in use"
    assert why_unusable("::1", port) is None


def sized(pool: str, settings: dict[str, object]) -> dict[str, Any]:
    return {"api": {"jobs": {"pool": settings}}} if pool == "jobs" else {f"{pool}_pool": settings}


def test_every_pool_has_a_place_on_a_machine_with_fewer_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    assert logical_cpus(AppConfig()) == 2
    pools = [sized(pool, {"num_cpus": 1}) for pool in POOLS.values()]
    assert logical_cpus(AppConfig.model_validate({name: value for each in pools for name, value in each.items()})) == 4
    three = {f"{pool}_pool": {"num_cpus": 1} for pool in ("ingress", "codec", "talker")} | {"api": {"extensions": []}}
    models = [{"name": name, "model": "embedded"} for name in "ab"]
    two = {**three, "models": models, "talker_scaling": {"max_replicas": 3}}
    assert [logical_cpus(AppConfig.model_validate(each)) for each in (three, two)] == [3, 1 + 2 + 6]


def test_nothing_is_started_that_others_could_use_without_a_key(listener: int, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="API keys are not required"):
        local_server.start(AppConfig(), Address("0.0.0.0", listener), RunFolder(tmp_path), pytest.fail)


@pytest.mark.usefixtures("servers_folder")
def test_nothing_is_started_for_a_taken_port(listener: int) -> None:
    stages: list[str] = []
    with (
        pytest.raises(StartError, match=f"{listener} cannot be used"),
        running(AppConfig(), listener, report=stages.append),
    ):
        pass
    assert stages == []


@pytest.mark.parametrize("pool", POOLS.values())
@pytest.mark.usefixtures("servers_folder")
def test_a_pool_for_labels_that_no_machine_here_has_is_refused(pool: str) -> None:
    config = AppConfig.model_validate(sized(pool, {"label_selector": {"pool": "codec"}}))
    with pytest.raises(StartError, match="label_selector: a local server has no labels"), running(config):
        pass


@pytest.mark.parametrize(
    ("load", "busy"), [(9.0, "; this machine is busy (load 9 on 4 CPUs), waiting for up to 600 s"), (0.0, "")]
)
def test_a_wait_says_whether_the_machine_is_busy(load: float, busy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "_BUSY_S", 0.01)
    monkeypatch.setattr(local_server, "_load", lambda: (load if len(lines) == 2 else 0.0, 4))
    lines, three = [], threading.Event()

    def report(line: str) -> None:
        lines.append(line)
        if len(lines) == 4:
            three.set()

    with local_server._waiting("starting Ray", report):
        assert three.wait(60)
    assert lines[:3] == ["starting Ray", "starting Ray: 0 s", f"starting Ray: 0 s{busy}"]


@pytest.mark.parametrize(("load", "polls", "answers"), [(0.0, 1, False), (9.0, 3, True), (0.0, 0, True)])
def test_a_busy_machine_may_be_slower(load: float, polls: int, answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = iter([*[False] * polls, answers])
    monkeypatch.setattr(local_server, "_is_ready", lambda address: next(ready))
    monkeypatch.setattr(local_server, "_load", lambda: (load, 2))
    monkeypatch.setattr(local_server, "_IDLE_PATIENCE_S", -1.0)
    monkeypatch.setattr(local_server, "_POLL_S", 0.0)
    with nullcontext() if answers else pytest.raises(StartError, match="/ready did not respond within 0 s"):
        local_server._await_ready(Address("127.0.0.1", 1), lambda line: None)


@pytest.mark.parametrize(("status", "path"), [(200, ""), (404, "/docs")])
def test_the_first_page_is_the_docs_where_no_extension_has_a_page(status: int, path: str) -> None:
    def answer(handler: QuietHandler) -> None:
        handler.answer(status if handler.path == "/" else 500, b"")

    with serving(type("Handler", (QuietHandler,), {"do_GET": answer})) as url:
        assert first_page(url) == f"{url}{path}"


def test_replicas_listen_on_loopback_wherever_their_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Mock()
    monkeypatch.setattr("ray.serve.start", start)
    local_server._start_proxy(Address("0.0.0.0", 8000))
    assert start.call_args.kwargs["http_options"]["host"] == "127.0.0.1"


Overview = tuple[str, dict[str, tuple[str, str]]]
STARTING: Overview = "DEPLOYING", {"Talker-a": ("UPDATING", "Waiting for resources"), "Codec": ("HEALTHY", "")}


@pytest.mark.parametrize(("seen", "failure"), [
    ([STARTING, STARTING], None), ([STARTING, ("UNHEALTHY", {})], "the application did not start: why"),
    ([STARTING, ("DEPLOY_FAILED", {})], "the application did not start: why"),
    ([STARTING, ("DEPLOYING", {"Talker-a": ("UPDATING", QUOTED)})], "^Talker-a did not start: /m/model"),
])  # fmt: skip
def test_a_roll_out_tells_progress(seen: list[Overview], failure: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def overview(status: str, states: dict[str, tuple[str, str]]) -> SimpleNamespace:
        def of(state: str, said: str) -> SimpleNamespace:
            return SimpleNamespace(status=SimpleNamespace(value=state), message=said)

        each = {name: of(*told) for name, told in states.items()}
        return SimpleNamespace(status=status, message="why", deployments=each)

    answers, lines, check = iter([*seen, ("RUNNING", {})]), list[str](), Mock()
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications={"talkray": overview(*next(answers))}))
    monkeypatch.setattr("ray.serve.run_many", Mock())
    monkeypatch.setattr("serve_app.app.build_app", Mock())
    monkeypatch.setattr(local_server, "_POLL_S", 0.0)
    with nullcontext() if failure is None else pytest.raises(StartError, match=failure):
        local_server.roll_out(AppConfig(), lines.append, check=check)
    assert [line.partition(" (")[0] for line in lines] == ["deploying", "speech model a starting, audio decoder ready"]
    assert check.call_count == (2 if failure is None else 1)


def test_the_root_cause_is_the_end_of_what_serve_quotes_or_the_message_itself() -> None:
    assert root_cause(QUOTED) == "/m/model.safetensors does not fit: a is missing;\nb is missing"
    assert root_cause("The deployment failed to start.") == "The deployment failed to start."


def test_a_proxy_that_fails_after_the_deployments_gives_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("ray.init", "deployments.serving.ray_start.extend_start_timeouts"):
        monkeypatch.setattr(name, Mock())
    for place, name in (
        (local_server.ray_settings, "apply_local"), (local_server.early_engine, "begin"),
        (local_server, "_await_controller"), (local_server, "roll_out"), (local_server, "_await_ready"),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, Mock())
    monkeypatch.setattr(local_server, "_start_proxy", Mock(side_effect=StartError("cannot bind")))
    with pytest.raises(StartError, match="cannot bind"):
        local_server.start(AppConfig(), Address("::1", free_port()), RunFolder(tmp_path), Mock())
    assert os.environ["TALKRAY_HOST"] == "[::1]"
