import os
import socket
from pathlib import Path

import pytest

from serve_app.cli import ray_settings
from serve_app.cli.ray_settings import CLUSTER, LOCAL, TUNED, apply_local, for_a_node, free_port, free_ports


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


@pytest.mark.parametrize(
    ("name", "value", "unset"),
    [
        ("RAY_SERVE_ENABLE_HA_PROXY", "0", None),
        ("RAY_AUTH_MODE", "disabled", "RAY_AUTH_TOKEN"),  # the user's own way of authentication
        ("RAY_SERVE_HAPROXY_BINARY_PATH", "/bin/true", "TALKRAY_HAPROXY"),  # and proxy
    ],
)
def test_what_the_user_has_set_stays(environment: dict[str, str], name: str, value: str, unset: str | None) -> None:
    environment[name] = value
    apply_local()
    assert environment[name] == value
    assert unset not in environment


@pytest.mark.parametrize(("own", "direct"), [
    ({"http_proxy": "http://p:1"}, "localhost,127.0.0.1,::1"), ({"http_proxy": "http://p:1", "no_proxy": "*"}, "*"),
    ({"https_proxy": "http://p:1", "no_proxy": "a.b, c.d"}, "a.b,c.d,localhost,127.0.0.1,::1"),
])  # fmt: skip
def test_loopback_needs_no_proxy(environment: dict[str, str], own: dict[str, str], direct: str) -> None:
    environment |= own
    on_a_node = for_a_node()
    assert (on_a_node | CLUSTER, (own | on_a_node).get("no_proxy")) == (on_a_node, direct)
    apply_local()
    assert environment.get("no_proxy") == direct


def test_two_servers_get_different_ports(environment: dict[str, str]) -> None:
    apply_local()
    ports = {value for name, value in environment.items() if name.endswith("_PORT")}
    assert len(ports) == 4
    assert ports.isdisjoint({"8404", "9101", "8500", "9500"})


def test_a_free_port_is_none_that_others_are_given() -> None:
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    chosen = {free_port() for _ in range(100)}
    assert len(chosen) > 50
    assert max(chosen) < given


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        offered = iter([taken, taken, free := free_port()])
        monkeypatch.setattr(ray_settings.random, "choice", lambda _: next(offered))
        assert free_port() == free


def test_free_ports_are_different_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = range(20_000, 20_002)
    offered = iter([one, one, other])
    monkeypatch.setattr(ray_settings, "free_port", lambda: next(offered))
    assert free_ports(2) == [one, other]


def test_connections_are_bounded_by_open_files(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_settings.resource, "getrlimit", lambda _: (1024, 3000))
    apply_local()
    assert environment["RAY_SERVE_HAPROXY_MAXCONN"] == "1000"


def test_ray_asks_for_a_token_of_this_start(environment: dict[str, str]) -> None:
    apply_local()
    first = environment["RAY_AUTH_TOKEN"]
    assert (environment["RAY_AUTH_MODE"], len(first)) == ("token", 64)
    environment.clear()
    apply_local()
    assert environment["RAY_AUTH_TOKEN"] != first


@pytest.mark.parametrize(("own", "is_new"), [
    ({"RAY_AUTH_MODE": "token"}, True),  # Ray would write one into a home folder, which may be read-only
    ({"RAY_AUTH_MODE": "token", "written": "yes"}, False),
    ({"written": "yes"}, True),
    ({"RAY_AUTH_TOKEN_PATH": "/run/token"}, False),
    ({"RAY_AUTH_MODE": "disabled"}, False),
])  # fmt: skip
def test_each_start_has_a_token(environment: dict[str, str], tmp_path: Path, own: dict[str, str], is_new: bool) -> None:
    environment |= {"HOME": str(tmp_path)} | own
    if environment.pop("written", ""):
        write_token(tmp_path)
    apply_local()
    assert ("RAY_AUTH_TOKEN" in environment) is is_new
    assert environment["RAY_AUTH_MODE"] == own.get("RAY_AUTH_MODE", "token")


def write_token(home: Path) -> None:
    home.joinpath(".ray").mkdir()
    home.joinpath(".ray", "auth_token").write_text("0" * 64, encoding="utf-8")


@pytest.mark.parametrize("own", [None, "disabled"])
@pytest.mark.parametrize("place", ["a file", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_ray_start_finds_our_token(environment: dict[str, str], tmp_path: Path, place: str, own: str | None) -> None:
    environment |= {"HOME": str(tmp_path)} | ({} if own is None else {"RAY_AUTH_MODE": own})
    assert "RAY_AUTH_MODE" not in for_a_node()
    if place == "a file":
        write_token(tmp_path)
    else:
        environment[place] = "0" * 64
    assert for_a_node().get("RAY_AUTH_MODE") == (None if own else "token")


def test_the_proxy_is_started_by_the_script(environment: dict[str, str]) -> None:
    apply_local()
    script = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
    assert os.access(script, os.X_OK)
    assert os.access(environment["TALKRAY_HAPROXY"], os.X_OK)
    assert environment["TALKRAY_HAPROXY"] != script
