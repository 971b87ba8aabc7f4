from pathlib import Path

import pytest

from deployments.progress import VARIABLE, Told, tell


def test_what_is_told_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "progress"
    monkeypatch.setenv(VARIABLE, str(file))
    told = Told.here()
    assert told.new_lines() == []
    tell("one")
    tell("two")
    assert told.new_lines() == ["one", "two"]
    with file.open("a", encoding="utf-8") as half:
        half.write("thr")
    assert told.new_lines() == []
    with file.open("a", encoding="utf-8") as rest:
        rest.write("ee\n")
    assert told.new_lines() == ["three"]


def test_without_a_listener_it_is_only_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    tell("one")
    assert Told.here().new_lines() == []
