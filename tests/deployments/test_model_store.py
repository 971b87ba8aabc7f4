import os
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from deployments import model_store
from deployments.errors import CheckpointError
from deployments.model_store import locate, repository
from deployments.released import REPOSITORIES

FILES = (
    "config.json",
    "vocab.json",
    "merges.txt",
    "model.safetensors",
    "speech_tokenizer/config.json",
    "speech_tokenizer/model.safetensors",
)


def make_checkpoint(directory: Path, files: tuple[str, ...] = FILES) -> Path:
    for name in files:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
    return directory


class FakeHub:
    """Stands for `snapshot_download`: a cache and a network, either of which may hold the checkpoint."""

    def __init__(self, *, cached: Path | None = None, remote: Path | None = None) -> None:
        self.cached, self.remote = cached, remote
        self.calls: list[tuple[str, str | None, bool]] = []

    def __call__(self, name: str, *, revision: str | None, local_files_only: bool = False) -> str:
        self.calls.append((name, revision, local_files_only))
        found = self.cached if local_files_only else self.remote
        if found is None:
            raise OSError("the hub cannot be reached")
        return str(found)


@pytest.fixture
def use_hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(hub: FakeHub) -> FakeHub:
        monkeypatch.setattr("deployments.hub.snapshot_download", hub)
        return hub

    return use


def test_a_complete_directory_is_its_own_location(tmp_path: Path) -> None:
    assert locate(str(make_checkpoint(tmp_path))) == tmp_path


def test_shards_with_an_index_are_complete(tmp_path: Path) -> None:
    files = (*(name for name in FILES if name != "model.safetensors"), "model.safetensors.index.json")
    assert locate(str(make_checkpoint(tmp_path, files))) == tmp_path


@pytest.mark.parametrize("lacking", FILES)
def test_an_incomplete_directory_is_refused_by_the_missing_name(lacking: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tuple(name for name in FILES if name != lacking))
    with pytest.raises(CheckpointError) as error:
        locate(str(tmp_path))
    assert str(error.value) == f"{tmp_path} is no complete Qwen3-TTS checkpoint, it lacks: {lacking}"


@pytest.mark.parametrize("name", ["./nowhere", f"{os.sep}no{os.sep}where", "~/nowhere-at-all"])
def test_a_path_is_never_taken_for_a_hugging_face_name(name: str, use_hub: Any) -> None:
    hub = use_hub(FakeHub())
    with pytest.raises(CheckpointError, match="no checkpoint directory"):
        locate(name)
    assert hub.calls == []


@pytest.mark.parametrize(
    "name",
    [
        "1.7B-CustomVoice",
        "1.7b-customvoice",
        "Qwen3-TTS-12Hz-1.7B-CustomVoice",
        "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
    ],
)
def test_released_names_may_be_short(name: str) -> None:
    assert repository(name) == "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"


def test_other_owners_keep_their_name() -> None:
    assert repository("someone/1.7B-CustomVoice") == "someone/1.7B-CustomVoice"


def test_a_misspelt_name_gets_a_hint_and_the_list() -> None:
    with pytest.raises(CheckpointError, match=r"did you mean '1\.7B-CustomVoice'") as error:
        repository("1.7B-CustomVioce")
    assert all(name in str(error.value) for name in REPOSITORIES)


def test_the_cache_is_enough(tmp_path: Path, use_hub: Any) -> None:
    hub = use_hub(FakeHub(cached=make_checkpoint(tmp_path)))
    assert locate("1.7B-Base", revision="v1") == tmp_path
    assert hub.calls == [("Qwen/Qwen3-TTS-12Hz-1.7B-Base", "v1", True)]


@pytest.mark.parametrize("cached", [None, ("config.json",)])
def test_what_the_cache_lacks_is_downloaded(cached: tuple[str, ...] | None, tmp_path: Path, use_hub: Any) -> None:
    partial = make_checkpoint(tmp_path / "partial", cached) if cached else None
    remote = make_checkpoint(tmp_path / "remote")
    hub = use_hub(FakeHub(cached=partial, remote=remote))
    assert locate("1.7B-Base") == remote
    assert [local for _, _, local in hub.calls] == [True, False]


def test_a_failed_download_says_what_to_do(use_hub: Any) -> None:
    use_hub(FakeHub())
    with pytest.raises(CheckpointError) as error:
        locate("Qwen/Qwen3-TTS-12Hz-1.7B-Bass")
    message = str(error.value)
    for part in (
        "the hub cannot be reached",
        "Did you mean Qwen/Qwen3-TTS-12Hz-1.7B-Base?",
        "HF_HOME",
        "`hf download Qwen/Qwen3-TTS-12Hz-1.7B-Bass`",
        str(constants.HF_HUB_CACHE),
    ):
        assert part in message


def test_a_name_that_no_repository_can_have_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no Hugging Face name"):
        locate("bad name/model")


def test_embedded_is_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "embedded_path", lambda: tmp_path)
    assert locate("embedded") == tmp_path
