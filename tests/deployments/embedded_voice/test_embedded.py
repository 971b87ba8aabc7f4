import errno
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deployments.config import TalkerConfig
from deployments.embedded_voice import checkpoint as embedded
from deployments.embedded_voice.checkpoint import EMBEDDED, EMBEDDED_BASE, PACKED, place, unpack, unpacked
from deployments.errors import CheckpointError
from deployments.protocol import FinishReason, ModelKind, SynthesisRequest
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine
from deployments.talker.model.model_config import ModelConfig
from deployments.weights.store import locate, missing_files


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("embedded") / "checkpoint"
    unpack(PACKED[EMBEDDED], directory)
    return directory


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return build_engine(checkpoint, TalkerConfig(device="cpu", max_num_seqs=4, max_model_len=512))


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


def test_it_is_the_same_every_time(checkpoint: Path, tmp_path: Path) -> None:
    unpack(PACKED[EMBEDDED], tmp_path / "again")
    assert digest(tmp_path / "again") == digest(checkpoint)


def test_it_has_named_voices(engine: Engine) -> None:
    assert (engine.model_config.kind, len(engine.model_config.speakers)) == (ModelKind.CUSTOM_VOICE, 8)
    assert list(engine.model_config.languages) == ["english"]


def test_every_voice_speaks_differently_and_ends(engine: Engine, checkpoint: Path) -> None:
    voices = list(engine.model_config.speakers)
    for number, voice in enumerate(voices):
        synthesis = SynthesisRequest(
            "test", "Hello, this is a plain sentence.", voice=voice, language="english", seed=7
        )
        engine.add(number, synthesis)
    frames: dict[int, list[np.ndarray]] = {number: [] for number in range(len(voices))}
    reasons = {}
    while not engine.is_idle:
        for number, chunk in engine.step().chunks:
            frames[number].append(chunk.codes)
            reasons[number] = chunk.finish_reason
    assert set(reasons.values()) == {FinishReason.STOP}
    spoken = {np.concatenate(codes).tobytes() for codes in frames.values()}
    assert len(spoken) == len(voices)


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
