"""The hub's real client against a hub on this machine, each download in a process of its own."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from deployments.errors import CheckpointError
from deployments.weights import store
from tests.fake_hub import BOUND_S, NAME, WEIGHTS, Hub, files, serving

LOCATE = """
from deployments.weights import store
try:
    print(store.locate("1.7B-CustomVoice", report=lambda line: print(line, flush=True)))
except store.CheckpointError as error:
    raise SystemExit(str(error))
"""


RESETS = """
import types
import huggingface_hub
from httpx2 import ReadError
from deployments.weights import hub
hub.time = types.SimpleNamespace(sleep=lambda seconds: None)
download, resets = huggingface_hub.snapshot_download, [ReadError("reset by peer")]
def reset(name, **options):
    if resets and "tqdm_class" in options:
        raise resets.pop()
    return download(name, **options)
huggingface_hub.snapshot_download = reset
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub({NAME: files()})) as hub:
        yield hub


def start(hub: Hub, folder: Path, before: str = "", **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", before + LOCATE], env=os.environ | hub.variables(folder) | variables,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(hub: Hub, folder: Path, before: str = "", **variables: str) -> tuple[list[str], str]:
    """What was said on the way, the directory last, and the error."""
    with start(hub, folder, before, **variables) as process:
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


@pytest.mark.parametrize("resets", [4, 5])
def test_a_reset_that_the_client_does_not_retry_is_tried_again(hub: Hub, tmp_path: Path, resets: int) -> None:
    said, error = run(hub, tmp_path, RESETS + f"resets *= {resets}")
    assert said.count(f"downloading {NAME}: the connection broke (reset by peer), trying again") == 4
    assert "could not be downloaded: reset by peer" in error if resets == 5 else arrived(said[-1], hub)


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr("deployments.weights.hub._fetch", Mock(side_effect=OSError(number, os.strerror(number))))
    said = f"the disk is full: {NAME} does not fit in .*. Free space, or set HF_HOME"
    with pytest.raises(CheckpointError, match=said):
        store.locate(NAME)


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "HF_TOKEN"), (403, "accept the repository's terms"), (404, "does not exist")]
)
def test_a_refusal_says_what_to_do(hub: Hub, tmp_path: Path, status: int, remedy: str) -> None:
    hub.refuses = status
    _, error = run(hub, tmp_path)
    assert error.startswith(f"{NAME} is not in the cache ")
    assert f"could not be downloaded: the hub answers {status}, " in error
    assert remedy in error


def test_a_hub_that_cannot_be_reached_is_told(hub: Hub, tmp_path: Path) -> None:
    _, error = run(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "could not be downloaded: " in error
    assert "refused" in error


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


def test_offline_without_the_files_is_told(hub: Hub, tmp_path: Path) -> None:
    _, error = run(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert error.startswith(f"{NAME} is not in the cache {tmp_path / 'hf' / 'hub'} and could not be downloaded: ")
    assert hub.asked == []


@pytest.mark.parametrize("file", ["config.json", "speech_tokenizer/config.json"])
def test_another_family_is_refused_unloaded(hub: Hub, tmp_path: Path, file: str) -> None:
    hub.repositories[NAME] = files(**{file: b'{"model_type": "qwen2"}'})
    _, error = run(hub, tmp_path)
    assert error.startswith(f"{NAME} is a checkpoint of another family: {file} has model_type")
    assert error.count("\n") == 1
    assert [line for line in hub.asked if line.startswith("GET /files/")] == []


def test_a_repository_without_weights_is_refused(hub: Hub, tmp_path: Path) -> None:
    del hub.repositories[NAME]["speech_tokenizer/model.safetensors"]
    _, error = run(hub, tmp_path)
    assert error.strip() == (
        f"{NAME} is not a complete Qwen3-TTS checkpoint. Missing files: "
        f"{Path('speech_tokenizer') / 'model.safetensors'}"
    )
