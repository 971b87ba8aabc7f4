import errno
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deployments.embedded_voice import checkpoint as embedded
from deployments.embedded_voice.checkpoint import EMBEDDED, EMBEDDED_BASE, PACKED, place, unpack, unpacked
from deployments.errors import CheckpointError
from deployments.protocol import ModelKind
from deployments.talker.model.model_config import ModelConfig
from deployments.weights.store import locate, missing_files


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("embedded") / "checkpoint"
    unpack(PACKED[EMBEDDED], directory)
    return directory


def digest(directory: Path) -> dict[str, str]:
    files = (file for file in directory.rglob("*") if file.is_file())
    return {str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TALKRAY_CACHE", str(tmp_path))
    return tmp_path


def test_it_is_complete_and_small(checkpoint: Path) -> None:
    assert missing_files(checkpoint) == []
    packed = [file.stat().st_size for file in PACKED[EMBEDDED][0].rglob("*") if file.is_file()]
    assert sum(packed) < 16e6
    assert max(packed) < 14e6


def test_its_sibling_has_the_same_networks_and_clones(checkpoint: Path, tmp_path: Path) -> None:
    unpack(PACKED[EMBEDDED_BASE], sibling := tmp_path / "sibling")
    assert missing_files(sibling) == []
    assert ModelConfig.load(sibling).kind is ModelKind.BASE
    own, other = (load_file(directory / "model.safetensors") for directory in (sibling, checkpoint))
    added = own.keys() - other.keys()
    assert added
    assert all(name.startswith("speaker_encoder.") for name in added)
    assert all(torch.equal(own[name], tensor) for name, tensor in other.items())
    assert sum(file.stat().st_size for file in PACKED[EMBEDDED_BASE][-1].rglob("*") if file.is_file()) < 1e6


def test_it_is_written_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def write(packed: object, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        written.append(directory)

    monkeypatch.setattr(embedded, "unpack", write)
    assert locate(EMBEDDED) == unpacked(EMBEDDED, cache)
    assert len(written) == 1
    assert [cache / file.name for file in cache.iterdir()] == [locate(EMBEDDED)]


def test_another_voice_gets_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory, weights in ((first, b"1"), (second, b"2")):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors.gz").write_bytes(weights)
    monkeypatch.setattr(embedded, "PACKED", {"first": (first,), "second": (second,)})
    assert place("first", tmp_path) != place("second", tmp_path)
    (second / "model.safetensors.gz").write_bytes(b"1")
    assert place("first", tmp_path) == place("second", tmp_path)


def test_two_writers_at_once_leave_one_checkpoint(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_writing = threading.Barrier(2)

    def write(packed: object, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        both_writing.wait()

    monkeypatch.setattr(embedded, "unpack", write)
    with ThreadPoolExecutor(2) as pool:
        first, second = (future.result() for future in [pool.submit(locate, EMBEDDED) for _ in range(2)])
    assert first == second
    assert [file.name for file in cache.iterdir()] == [first.name]
    assert (first / "config.json").read_text() == "{}"


def test_a_writer_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(packed: object, directory: Path) -> None:
        directory.mkdir()
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(embedded, "unpack", fail)
    with pytest.raises(CheckpointError, match=r"disk full.*free space there"):
        locate(EMBEDDED)
    assert list(cache.iterdir()) == []
