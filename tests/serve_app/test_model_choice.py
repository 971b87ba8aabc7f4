from pathlib import Path

import pytest

from deployments.released import REPOSITORIES
from serve_app import model_choice
from serve_app.model_choice import EMBEDDED, RELEASED, choose


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names that the Hugging Face cache holds."""
    cached: set[str] = set()
    monkeypatch.setattr(
        model_choice, "try_to_load_from_cache", lambda name, file: f"/{name}/{file}" if name in cached else None
    )
    return cached


def released(folder: Path, name: str) -> str:
    directory = folder / name.split("/")[1]
    directory.mkdir()
    (directory / "config.json").write_text("{}", encoding="utf-8")
    return str(directory)


def test_a_name_is_taken_as_it_is() -> None:
    assert choose("1.7B-Base", models_dir=None, gpu=False).model == "1.7B-Base"


def test_without_a_gpu_auto_is_the_embedded_model(tmp_path: Path, empty_cache: set[str]) -> None:
    released(tmp_path, RELEASED[0])
    empty_cache.add(RELEASED[0])
    choice = choose("auto", models_dir=tmp_path, gpu=False)
    assert choice.model == EMBEDDED
    assert "no GPU" in choice.reason


def test_auto_prefers_the_given_folder(tmp_path: Path, empty_cache: set[str]) -> None:
    directory = released(tmp_path, RELEASED[0])
    empty_cache.add(RELEASED[0])
    choice = choose("auto", models_dir=tmp_path, gpu=True)
    assert choice.model == directory
    assert str(tmp_path) in choice.reason


def test_auto_takes_what_is_in_the_cache(empty_cache: set[str]) -> None:
    empty_cache.update(RELEASED[2:4])
    assert choose("auto", models_dir=None, gpu=True).model == RELEASED[2]


def test_auto_downloads_nothing() -> None:
    choice = choose("auto", models_dir=None, gpu=True)
    assert choice.model == EMBEDDED
    assert "--model" in choice.reason


def test_every_released_checkpoint_is_known() -> None:
    assert set(RELEASED) == set(REPOSITORIES.values())
