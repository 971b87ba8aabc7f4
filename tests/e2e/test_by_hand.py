"""A node that is started by hand, as README has it, but for the ports: others may use the well-known ones."""

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from ray.util import get_node_ip_address

from serve_app.cli.ray_settings import free_port
from tools.suites.processes import MARK, end_marked

ROOT = Path(__file__).parents[2]
BOUND_S = 120
# What HAProxy would take for all servers of this machine, were it not told.
PORTS = ("HAPROXY_STATS", "HAPROXY_METRICS", "FALLBACK_PROXY_HTTP", "FALLBACK_PROXY_GRPC")
SEQUENCE = """
set -e
ulimit -n {files}
eval "$(talkray env)"
ray start --head --port={port} --dashboard-port={dashboard} --temp-dir={folder}/ray
serve deploy --address http://127.0.0.1:{dashboard} {folder}/local.yaml
"""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A new user's whose shell finds the commands. Nothing that is started in it outlives the test."""
    mark = uuid.uuid4().hex
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own |= {f"RAY_SERVE_{name}_PORT": str(free_port()) for name in PORTS}
    yield own | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", MARK: mark, "HOME": str(tmp_path)}
    end_marked(mark)


def spoken(url: str) -> bytes:
    until_s = time.monotonic() + BOUND_S
    while True:
        try:
            body = b'{"input": "Hello.", "voice": "alloy", "response_format": "wav"}'
            with urllib.request.urlopen(f"{url}/v1/audio/speech", body, timeout=BOUND_S) as answer:
                content: bytes = answer.read()
                return content
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > until_s:
                raise
            time.sleep(0.5)


def run_talkray(arguments: str, environment: dict[str, str], **changes: str) -> str:
    """Everything that the command prints."""
    command = [sys.executable, "-m", "serve_app", *arguments.split()]
    done = subprocess.run(
        command, env=environment | changes, capture_output=True, text=True, timeout=BOUND_S, check=False, cwd=ROOT
    )
    return done.stdout + done.stderr


@pytest.mark.faults  # two minutes: `make docs` runs the same commands
@pytest.mark.parametrize(("files", "had_ray"), [(4096, False), (20_000, False), (20_000, True)])
def test_the_sequence_of_readme_speaks(environment: dict[str, str], files: int, had_ray: bool) -> None:
    if had_ray:  # what a local ray.init() leaves behind
        token = Path(environment["HOME"], ".ray", "auth_token")
        token.parent.mkdir()
        token.write_text(secrets.token_hex(32), encoding="utf-8")
    folder = subprocess.check_output(["mktemp", "-d", "/tmp/XXX"], text=True).strip()  # short, as sockets need
    try:
        config = yaml.safe_load((ROOT / "cluster" / "serve" / "local.yaml").read_text(encoding="utf-8"))
        config["http_options"]["port"] = port = free_port()
        Path(folder, "local.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        gcs_port, dashboard = free_port(), free_port()
        script = SEQUENCE.format(files=files, folder=folder, port=gcs_port, dashboard=dashboard)
        subprocess.run(["bash", "-c", script], env=environment, check=True, timeout=BOUND_S)
        assert spoken(f"http://127.0.0.1:{port}").startswith(b"RIFF")
        if had_ray:
            only_the_token_opens(environment, f"{get_node_ip_address()}:{gcs_port}", port, dashboard)
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)


def only_the_token_opens(environment: dict[str, str], ray: str, port: int, dashboard: int) -> None:
    """Commands that ask Ray work with the cluster's token, and say that another one is wrong."""
    node = environment | {"RAY_ADDRESS": ray, "RAY_AUTH_MODE": "token"}
    assert "request none is not in the logs of Ray Serve" in run_talkray("logs none", node)
    for changed in ({"RAY_AUTH_TOKEN": "wrong"}, {"HOME": "/nowhere"}, {"RAY_AUTH_MODE": "disabled"}):
        said = run_talkray("logs none", node, **changed)
        assert "Ray does not accept this command's token. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN" in said
    status = f"http://127.0.0.1:{dashboard}/api/serve/applications/"
    load = f"loadtest run --url http://127.0.0.1:{port} --serve-status-url {status} --rate 1 --duration 2 --out"
    results = Path(environment["HOME"], "results")
    said = run_talkray(f"{load} {results}", environment)
    samples = [json.loads(line) for line in (results / "replicas.jsonl").read_text(encoding="utf-8").splitlines()]
    assert samples[-1]["deployments"]["Talker"]["running"] == 1, said
    said = run_talkray(f"{load} {results}-wrong", environment, RAY_AUTH_TOKEN="wrong")
    assert f"{status} returned 'Forbidden: Invalid authentication token'. Set RAY_AUTH_TOKEN or" in said
