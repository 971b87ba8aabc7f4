"""Scenarios in data/records. To write one, write its commands, and renew the file; then read what they show."""

from pathlib import Path

import pytest

from tests.records import FOLDER
from tests.serve_app.scenario import play


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("serve_*.txt")))
def test_scenario(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(name, tmp_path, monkeypatch)
