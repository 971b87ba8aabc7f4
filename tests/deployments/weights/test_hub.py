"""The hub's real client against a hub on this machine, each download in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_hub import BOUND_S, NAME, WEIGHTS, Hub, files, serving

LOCATE = """
from deployments.weights import store
try:
    print(store.locate("1.7B-CustomVoice", report=lambda line: print(line, flush=True)))
except store.CheckpointError as error:
    raise SystemExit(str(error))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub({NAME: files()})) as hub:
        yield hub


def start(hub: Hub, folder: Path, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", LOCATE], env=os.environ | hub.variables(folder) | variables,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(hub: Hub, folder: Path, **variables: str) -> tuple[list[str], str]:
    """What was said on the way, the directory last, and the error."""
    with start(hub, folder, **variables) as process:
        said, error = process.communicate(timeout=BOUND_S)
    if not process.returncode:  # the client warns of broken connections
        return said.splitlines(), ""
    return said.splitlines(), error


def arrived(directory: str, hub: Hub) -> bool:
    return all((Path(directory) / path).read_bytes() == file.data for path, file in hub.repositories[NAME].items())


def test_all_files_arrive_and_the_way_is_told(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[NAME] = files(**{"adapter_config.json": b"{}"})  # beside a whole checkpoint
    said, _ = run(hub, tmp_path)
    assert arrived(said[-1], hub)
    assert said[0] == f"asking {hub.url} for {NAME}"
    [*_, last] = [line for line in said if line.startswith(f"downloading {NAME}: ")]
    assert re.search(r": 1\.22MB of 1\.22MB, [\d.]+[kM]?B/s, 00:00 left$", last)


@pytest.mark.parametrize("by_reset", [False, True])
def test_a_broken_connection_is_tried_again(hub: Hub, tmp_path: Path, by_reset: bool) -> None:
    hub.breaks = [(100_000, by_reset), (50_000, by_reset)]
    said, _ = run(hub, tmp_path)
    assert arrived(said[-1], hub)


@pytest.mark.parametrize("path", [WEIGHTS, "merges.txt"])
def test_a_wrong_hash_is_refused_and_deleted(hub: Hub, tmp_path: Path, path: str) -> None:
    hub.corrupt = {path}
    _, error = run(hub, tmp_path)
    file = hub.repositories[NAME][path]
    assert f"{path} of {NAME} is corrupt" in error
    assert file.etag in error
    assert not [*tmp_path.rglob(file.etag)]
    hub.corrupt = set()
    said, _ = run(hub, tmp_path)
    assert arrived(said[-1], hub)


def test_files_that_arrived_before_an_abort_are_kept(hub: Hub, tmp_path: Path) -> None:
    hub.gate = threading.Event()  # large files stop half-way
    with start(hub, tmp_path) as process:
        assert hub.at_gate.wait(BOUND_S)
        process.send_signal(signal.SIGKILL)
    hub.gate.set()
    said, _ = run(hub, tmp_path)
    assert arrived(said[-1], hub)
    assert len([line for line in hub.asked if line.startswith("GET") and line.endswith("/config.json")]) == 2  # of two


def test_two_starts_at_once_share_the_cache(hub: Hub, tmp_path: Path) -> None:
    hub.gate = threading.Event()
    with start(hub, tmp_path) as first, start(hub, tmp_path) as second:
        assert hub.at_gate.wait(BOUND_S)
        hub.gate.set()
        ends = [process.communicate(timeout=BOUND_S) for process in (first, second)]
    assert [error for _, error in ends] == ["", ""]
    assert all(arrived(said.splitlines()[-1], hub) for said, _ in ends)


def test_afterwards_no_hub_is_needed(tmp_path: Path) -> None:
    with serving(Hub({NAME: files()})) as hub:
        [*_, directory], _ = run(hub, tmp_path)
    assert run(hub, tmp_path)[0] == [directory]
    assert run(hub, tmp_path, HF_HUB_OFFLINE="1")[0] == [directory]
