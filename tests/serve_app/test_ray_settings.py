import os

import pytest

from serve_app import ray_settings
from serve_app.ray_settings import LOCAL, TUNED, apply_local


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment that is this test's alone, without any Ray setting."""
    own: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", own)
    return own


def test_the_tuned_settings_are_applied(environment: dict[str, str]) -> None:
    apply_local()
    adapted = {"RAY_SERVE_HAPROXY_MAXCONN"}
    for name, value in {**TUNED, **LOCAL}.items():
        assert name in adapted or environment[name] == value


def test_what_the_user_has_set_stays(environment: dict[str, str]) -> None:
    environment["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
    apply_local()
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "0"


def test_two_servers_get_different_ports(environment: dict[str, str]) -> None:
    apply_local()
    ports = {value for name, value in environment.items() if name.endswith("_PORT")}
    assert len(ports) == 4
    assert ports.isdisjoint({"8404", "9101", "8500", "9500"})


def test_the_proxy_takes_no_more_connections_than_files_can_be_open(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_settings.resource, "getrlimit", lambda _: (1024, 3000))
    apply_local()
    assert environment["RAY_SERVE_HAPROXY_MAXCONN"] == "1000"
