"""The hub's real client against a hub on this machine, each download in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.weights.download import Transfer
from tests.fake_hub import Hub, HubFile, serving

NAME = "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"
BOUND_S = 60
WEIGHTS = "model-00001-of-00002.safetensors"
LOCATE = """
from deployments.weights import download
from deployments.weights import store as model_store
download._ATTEMPTS = 2
try:
    print(model_store.locate("1.7B-CustomVoice", report=lambda transfer: print(transfer, flush=True)))
except model_store.CheckpointError as error:
    raise SystemExit(str(error))
"""


def files(**changes: bytes) -> dict[str, HubFile]:
    """A repository of the official layout, whose weights nobody loads."""
    weights = bytes(range(256)) * 2000
    content = {
        "config.json": b'{"model_type": "qwen3_tts"}',
        "generation_config.json": b"{}",
        "vocab.json": b"{}",
        "merges.txt": b"#",
        "speech_tokenizer/config.json": b'{"model_type": "qwen3_tts_tokenizer_12hz"}',
        "speech_tokenizer/model.safetensors": weights[:200_000],
        WEIGHTS: weights,
        "model-00002-of-00002.safetensors": weights[7:],
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": WEIGHTS, "b": "model-00002-of-00002.safetensors"}}
        ).encode(),
    } | changes
    return {path: HubFile(path, data) for path, data in content.items()}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub({NAME: files()})) as hub:
        yield hub


def start(hub: Hub, folder: Path, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", LOCATE],
        env=os.environ | hub.variables(folder) | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(hub: Hub, folder: Path, **variables: str) -> tuple[list[str], str]:
    """What was said on the way, the directory last, and the error."""
    with start(hub, folder, **variables) as process:
        said, error = process.communicate(timeout=BOUND_S)
    assert process.returncode == bool(error), error
    assert "Traceback" not in error
    return said.splitlines(), error


def arrived(directory: str, hub: Hub) -> bool:
    return all((Path(directory) / path).read_bytes() == file.data for path, file in hub.repositories[NAME].items())


def blobs(folder: Path) -> Path:
    [found] = folder.glob("hf/hub/models--*/blobs")
    return found


def test_all_files_arrive_and_the_way_is_told(hub: Hub, tmp_path: Path) -> None:
    said, _ = run(hub, tmp_path)
    assert arrived(said[-1], hub)
    assert said[1].startswith(f"downloading {NAME}: 0 B of 1.22 MB")
    assert said[-2].startswith(f"downloading {NAME}: 1.22 MB of 1.22 MB, ")
    assert said[-2].endswith(" MB/s, 0:00 left")


def test_a_broken_connection_goes_on_where_it_broke(hub: Hub, tmp_path: Path) -> None:
    hub.breaks = [(200_000, False), (100_000, True), (50_000, False)]
    said, _ = run(hub, tmp_path)
    assert arrived(said[-1], hub)
    firsts = hub.served("speech_tokenizer/model.safetensors") + hub.served("model-00002-of-00002.safetensors")
    assert hub.served(WEIGHTS)[0] == 0
    broken = [line for line in said if "the connection broke, going on" in line]
    assert len(broken) >= 2
    assert all("/s, 0:" in line for line in broken)
    assert sum(first > 0 for first in firsts + hub.served(WEIGHTS)) >= 2


def test_a_connection_that_stays_broken_is_told_and_the_next_start_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.breaks = [(100_000, False), (0, False), (0, False)]
    _, error = run(hub, tmp_path)
    assert error.startswith(f"{NAME} could not be downloaded from {hub.url}: ")
    assert f"What has arrived is kept in {blobs(tmp_path)}" in error
    first, *others = hub.served("speech_tokenizer/model.safetensors")
    assert (first, others) == (0, [100_000, 100_000])
    hub.asked.clear()
    said, _ = run(hub, tmp_path)
    assert arrived(said[-1], hub)
    assert hub.served("speech_tokenizer/model.safetensors") == [100_000]


@pytest.mark.parametrize("path", [WEIGHTS, "config.json", "vocab.json"])
def test_a_wrong_hash_is_refused_and_deleted(hub: Hub, tmp_path: Path, path: str) -> None:
    hub.corrupt = {path}
    if path == "config.json":  # read before anything else: what is said of it must not be believed either
        hub.repositories[NAME] = files(**{"config.json": b'{"model_type": "qwen3_tts"}  '})
    _, error = run(hub, tmp_path)
    file = hub.repositories[NAME][path]
    assert f"{path} of {NAME} did not arrive as the hub has it" in error
    assert file.etag in error
    assert ("SHA-256" if path == WEIGHTS else "git SHA-1") in error
    assert [blob for blob in blobs(tmp_path).iterdir() if blob.name.startswith(file.etag)] == []
    hub.corrupt = set()
    said, _ = run(hub, tmp_path)
    assert arrived(said[-1], hub)


def test_a_disk_that_is_too_small_is_told_before_the_first_byte(hub: Hub, tmp_path: Path) -> None:
    hub.sizes = {WEIGHTS: 10**15}
    _, error = run(hub, tmp_path)
    assert error.startswith(f"the disk is full: {NAME} needs 1000000 GB more, and ")
    assert f"in {blobs(tmp_path)}: make room, or set HF_HOME" in error
    assert hub.served(WEIGHTS) == []


def test_a_disk_that_fills_up_is_told_by_folder_and_size(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "hf" / "hub" / f"models--{NAME.replace('/', '--')}" / "blobs"
    folder.mkdir(parents=True)
    (folder / f"{hub.repositories[NAME][WEIGHTS].etag}.incomplete").symlink_to("/dev/full")
    _, error = run(hub, tmp_path)
    assert error.startswith(f"the disk is full: {NAME} needs 512 kB for {WEIGHTS} in {folder}: make room")


def read_until(process: "subprocess.Popen[str]", wanted: str) -> None:
    assert process.stdout is not None
    assert any(wanted in line for line in process.stdout), f"it ended before it said {wanted!r}"


@pytest.mark.parametrize("dies", [False, True])
def test_a_second_start_waits_and_takes_over_from_one_that_dies(hub: Hub, tmp_path: Path, dies: bool) -> None:
    path = "model-00002-of-00002.safetensors"
    hub.breaks, hub.gate = [(200_000, False), (100_000, False)], threading.Event()  # so much of it is there at the gate
    with start(hub, tmp_path) as first:
        assert hub.at_gate.wait(BOUND_S)
        with start(hub, tmp_path) as second:
            read_until(second, f"waiting for another process, which downloads {NAME}")
            if dies:
                first.send_signal(signal.SIGKILL)
                first.wait(BOUND_S)
            hub.gate.set()
            said, error = second.communicate(timeout=BOUND_S)
        first.communicate(timeout=BOUND_S)
    assert error == ""
    assert arrived(said.splitlines()[-1], hub)
    asked_from = hub.served(path)
    assert asked_from[:2] == [0, 100_000]
    assert [first_byte >= 100_000 for first_byte in asked_from[2:]] == [True] * dies
    assert len(hub.served(WEIGHTS)) == 1


def test_afterwards_no_hub_is_needed(tmp_path: Path) -> None:
    with serving(Hub({NAME: files()})) as hub:
        [*_, directory], _ = run(hub, tmp_path)
    assert run(hub, tmp_path)[0] == [directory]
    assert run(hub, tmp_path, HF_HUB_OFFLINE="1")[0] == [directory]


def test_offline_without_the_files_is_told(hub: Hub, tmp_path: Path) -> None:
    _, error = run(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert error.startswith(f"{NAME} is not in the cache {tmp_path / 'hf' / 'hub'} and could not be downloaded: ")
    assert hub.asked == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"config.json": b'{"model_type": "qwen2"}'}, "is a checkpoint of another family: config.json says model_type"),
        (
            {"speech_tokenizer/config.json": b'{"model_type": "qwen3_tts_tokenizer_25hz"}'},
            "is a checkpoint of another family: speech_tokenizer/config.json says model_type",
        ),
        (
            {"config.json": b'{"model_type": "qwen3_tts", "quantization_config": {}}'},
            "is quantised, by its config.json",
        ),
    ],
)
def test_another_family_is_refused_before_its_weights(
    hub: Hub, tmp_path: Path, changes: dict[str, bytes], says: str
) -> None:
    hub.repositories[NAME] = files(**changes)
    _, error = run(hub, tmp_path)
    assert error.startswith(f"{NAME} {says}")
    assert error.count("\n") == 1
    assert [line for line in hub.asked if line.startswith("GET /files/")] == []


def test_a_repository_without_weights_is_refused(hub: Hub, tmp_path: Path) -> None:
    del hub.repositories[NAME]["speech_tokenizer/model.safetensors"]
    _, error = run(hub, tmp_path)
    assert error.strip() == (
        f"{NAME} is no complete Qwen3-TTS checkpoint, it lacks: {Path('speech_tokenizer') / 'model.safetensors'}"
    )


@pytest.mark.parametrize(
    ("transfer", "line"),
    [
        (Transfer("asking"), "asking"),
        (Transfer("getting x", 0, 3_860_000_000), "getting x: 0 B of 3.86 GB"),
        (Transfer("x", 1_200_000_000, 3_860_000_000, 45.1e6), "x: 1.2 GB of 3.86 GB, 45.1 MB/s, 0:59 left"),
        (Transfer("x", 5_000, 40_000_000, 1_000), "x: 5 kB of 40 MB, 1 kB/s, 11:06:35 left"),
    ],
)
def test_a_transfer_reads_as_a_line(transfer: Transfer, line: str) -> None:
    assert str(transfer) == line
