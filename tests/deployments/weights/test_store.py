import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from huggingface_hub import constants
from safetensors import SafetensorError

from deployments.embedded_voice import checkpoint
from deployments.embedded_voice.checkpoint import EMBEDDED
from deployments.errors import CheckpointError, StartError
from deployments.weights.choice import resolve_auto
from deployments.weights.store import REPOSITORIES, cache_directory, find, locate, repository

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


@pytest.mark.parametrize(("file", "content", "says"), [
    ("config.json", '{"model_type": "qwen2"}', "of another family: config.json has model_type 'qwen2'"),
    ("config.json", "[]", "of another family: config.json has model_type None"),
    ("config.json", "{", "config.json of {} is not JSON"),
    ("config.json", '{"model_type": "qwen3_tts", "quantization_config": {}}', "is quantized"),
    ("speech_tokenizer/config.json", '{"model_type": "qwen3_tts_tokenizer_25hz"}', "of another family"),
])  # fmt: skip
def test_another_family_is_refused_in_one_sentence(file: str, content: str, says: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        locate(str(tmp_path))
    assert says.replace("{}", str(tmp_path)) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_bare_lora_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"holds a LoRA adapter only: merge it"):
        locate(str(tmp_path))


@pytest.mark.parametrize("lacking", FILES)
def test_an_incomplete_directory_is_refused_by_the_missing_name(lacking: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tuple(name for name in FILES if name != lacking))
    with pytest.raises(CheckpointError) as error:
        locate(str(tmp_path))
    assert str(error.value) == f"{tmp_path} is not a complete Qwen3-TTS checkpoint. Missing files: {lacking}"


@pytest.mark.parametrize("name", ["./nowhere", f"{os.sep}no{os.sep}where", "~/nowhere-at-all"])
def test_a_path_is_never_taken_for_a_hugging_face_name(name: str, looked_for: list[str]) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint directory .* does not exist"):
        locate(name)
    assert looked_for == []


def test_a_misspelt_name_gets_a_hint_and_the_list() -> None:
    with pytest.raises(CheckpointError, match=r"did you mean '1\.7B-CustomVoice'") as error:
        repository("1.7B-CustomVioce")
    assert all(name in str(error.value) for name in REPOSITORIES)
    with pytest.raises(CheckpointError, match="not a Hugging Face name"):
        locate("bad name/model")


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


def test_a_folder_that_takes_no_voice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TALKRAY_CACHE", "/proc/talkray")
    with pytest.raises(CheckpointError, match=r"needs 37 MB in /proc/talkray \(No such file or directory\)"):
        locate("embedded")


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


@pytest.mark.parametrize("name", [
    "1.7B-CustomVoice", "1.7b-customvoice", "Qwen3-TTS-12Hz-1.7B-CustomVoice", "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
    "someone/1.7B-CustomVoice",
])  # fmt: skip
def test_released_names_may_be_short_and_other_owners_keep_theirs(name: str) -> None:
    assert repository(name) == (name if name.startswith("someone/") else "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice")


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


@pytest.mark.parametrize(("model", "gpu", "in_folder", "cached", "chosen", "reason"), [
    ("1.7B-Base", False, True, RELEASED, "1.7B-Base", "by name"),
    ("auto", False, True, RELEASED, EMBEDDED, "no GPU"), ("auto", True, True, RELEASED, "the folder", "found in"),
    ("auto", True, False, RELEASED[2:4], RELEASED[2], "cache"), ("auto", True, False, (), EMBEDDED, "--model"),
])  # fmt: skip
def test_auto_takes_what_is_here(
    model: str, gpu: bool, in_folder: bool, cached: tuple[str, ...], chosen: str, reason: str, tmp_path: Path,
    empty_cache: set[str],
) -> None:  # fmt: skip
    directory = released(tmp_path, RELEASED[0])
    empty_cache.update(cached)
    choice = resolve_auto(model, models_dir=tmp_path if in_folder else None, gpu=gpu)
    assert choice.model == (directory if chosen == "the folder" else chosen)
    assert reason in choice.reason


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TALKRAY_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.raises(StartError, match="TALKRAY_CACHE"):
        cache_directory()
