from pathlib import Path
from unittest.mock import Mock

import pytest
from huggingface_hub import constants
from safetensors import SafetensorError

from deployments.embedded_voice import checkpoint
from deployments.errors import CheckpointError
from deployments.weights.store import REPOSITORIES, find, locate, read_json

RELEASED = tuple(REPOSITORIES.values())
FILES = (
    "config.json", "vocab.json", "merges.txt", "model.safetensors", "speech_tokenizer/config.json",
    "speech_tokenizer/model.safetensors",
)  # fmt: skip
CONTENT = {
    "config.json": '{"model_type": "qwen3_tts"}',
    "speech_tokenizer/config.json": '{"model_type": "qwen3_tts_tokenizer_12hz"}',
    "model.safetensors.index.json": '{"weight_map": {"a": "shard-1.safetensors", "b": "shard-2.safetensors"}}',
}


def make_checkpoint(directory: Path, files: tuple[str, ...] = FILES) -> Path:
    for name in files:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(CONTENT.get(name, ""), encoding="utf-8")
    return directory


@pytest.fixture
def looked_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that the cache was asked for, which is empty. No hub can be reached: test_hub.py has the real client."""
    names: list[str] = []

    def look(name: str, *, local_files_only: bool) -> str:
        assert local_files_only
        names.append(name)
        raise OSError("it is not in the cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", look)
    monkeypatch.setattr("deployments.weights.hub._fetch", Mock(side_effect=OSError("the hub cannot be reached")))
    return names


def test_a_complete_directory_is_its_own_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate(str(make_checkpoint(tmp_path))) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert locate(f"~/{tmp_path.name}") == tmp_path


def test_shards_with_an_index_are_complete(tmp_path: Path) -> None:
    files = (*(name for name in FILES if name != "model.safetensors"), "model.safetensors.index.json")
    make_checkpoint(tmp_path, (*files, "shard-1.safetensors", "shard-2.safetensors"))
    assert locate(str(tmp_path)) == tmp_path
    (tmp_path / "shard-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"Missing files: shard-2\.safetensors$"):
        locate(str(tmp_path))


def test_a_part_of_a_checkpoint_in_the_cache_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, whole = make_checkpoint(tmp_path / "partial", FILES[:1]), make_checkpoint(tmp_path / "whole")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(partial))
    monkeypatch.setattr("deployments.weights.hub._fetch", lambda name, report: whole)
    assert locate("1.7B-Base") == whole


@pytest.mark.usefixtures("looked_for")
def test_a_failed_download_says_what_to_do() -> None:
    with pytest.raises(CheckpointError) as error:
        locate("Qwen/Qwen3-TTS-12Hz-1.7B-Bass")
    message = str(error.value)
    for part in (
        "the hub cannot be reached", "Did you mean Qwen/Qwen3-TTS-12Hz-1.7B-Base?", "HF_HOME",
        "`hf download Qwen/Qwen3-TTS-12Hz-1.7B-Bass`", str(constants.HF_HUB_CACHE),
    ):  # fmt: skip
        assert part in message


def test_a_folder_that_fills_up_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full = SafetensorError("No space left on device (os error 28)")
    monkeypatch.setenv("TALKRAY_CACHE", str(tmp_path))
    monkeypatch.setattr(checkpoint, "unpack", Mock(side_effect=full))
    with pytest.raises(CheckpointError, match=rf"in {tmp_path} \(No space left on device"):
        locate("embedded")


def test_only_what_is_here_is_found(tmp_path: Path, looked_for: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALKRAY_CACHE", str(tmp_path / "cache"))
    assert [find(model) for model in ("1.7B-Base", "embedded")] == [None, None]
    assert looked_for == ["Qwen/Qwen3-TTS-12Hz-1.7B-Base"]
    assert locate("embedded") == find("embedded")


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names that the Hugging Face cache holds."""
    cached: set[str] = set()
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda name, file: f"/{name}/{file}" if name in cached else None
    )
    return cached


def released(folder: Path, name: str) -> str:
    directory = folder / name.split("/")[1]
    directory.mkdir()
    (directory / "config.json").write_text("{}", encoding="utf-8")
    return str(directory)


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes("{}".encode("utf-16"))
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        read_json(tmp_path / "config.json")
