"""Two servers, started by command and beside each other: one as a newcomer has it, one that another user guards."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from serve_app.cli.key_file import create_key
from tests.e2e.black_box import ServerCommand, as_user, ends_while_it_speaks, serving

IS_ROOT = os.geteuid() == 0  # only root may act as another user
NEIGHBOUR = 54321  # no user of this machine has this number
WELL_KNOWN = Path("/tmp/haproxy-serve")
CANARY = "Zanzibarian quokkas whisper"  # in no log
ORIGIN = "https://app.example.com"
BOUND_S = 120
NOISE = ("INFO", "WARNING", "raylet", "Traceback")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@dataclass(frozen=True, slots=True)
class Guarded:
    """A server that asks for keys, can clone, and prints requests as JSON lines into a file of their own."""

    server: ServerCommand
    file: Path
    key: str
    requests: Path
    pids: dict[int, str]

    @property
    def url(self) -> str:
        return self.server.url

    def lines(self) -> list[dict[str, object]]:
        """The requests so far; nothing else is printed there."""
        return [json.loads(line) for line in self.requests.read_text().splitlines()]


def as_neighbour(script: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    user = ["setpriv", f"--reuid={NEIGHBOUR}", f"--regid={NEIGHBOUR}", "--clear-groups"]
    command = [*user, "sh", "-c", script, "sh", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd="/")


@pytest.fixture(scope="package")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerCommand]:
    """A server for tests that leave it as it was. The neighbour has made the folder that Ray would use before, and lets
    everybody write there.
    """
    if IS_ROOT:
        shutil.rmtree(WELL_KNOWN, ignore_errors=True)
        assert as_neighbour("mkdir -m 777 $1 && chmod 777 $1", WELL_KNOWN).returncode == 0
    with serving(tmp_path_factory.mktemp("plain")) as server:
        yield server
        ends_while_it_speaks(server, "KILL to the process")
    if IS_ROOT:
        shutil.rmtree(WELL_KNOWN)


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """The neighbour's, where there is one. It prints no text and no key, and nothing of it outlives Ctrl-C."""
    folder = tmp_path_factory.mktemp("guarded")
    requests = folder / "requests"
    through = ["sh", "-c", 'exec "$@" >"$0"', str(requests), *(as_user(NEIGHBOUR) if IS_ROOT else ())]
    with tempfile.TemporaryDirectory(prefix="home") as home:
        file = Path(home, "keys.json")
        key = create_key(file, "ada")
        for each in (home, file) if IS_ROOT else ():
            os.chown(each, NEIGHBOUR, NEIGHBOUR)
        options = (
            "--model", "embedded", "--model", "embedded-base", "--host", "0.0.0.0", "--keys", str(file),
            "--json", "--allow-origin", ORIGIN,
        )  # fmt: skip
        # Logs are read while the server runs.
        environment = {"HOME": home, "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1"}
        with serving(folder, *options, through=through, environment=environment) as server:
            server.key = key
            guarded = Guarded(server, file, key, requests, server.processes())
            yield guarded
            ends_while_it_speaks(server, "INT to its group")
    assert "stopping" in server.output
    assert [noise for noise in (*NOISE, CANARY, key) if noise in server.output] == []
    assert {"id", "outcome"} <= set.intersection(*map(set, guarded.lines()))
    assert CANARY not in requests.read_text()
    assert key not in requests.read_text()
