from pathlib import Path

import pytest

from deployments.serving.progress import VARIABLE, StageLog, report_stage


def test_what_is_reported_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "progress"
    monkeypatch.setenv(VARIABLE, str(file))
    stages = StageLog.here()
    assert stages.new_lines() == []
    report_stage("one")
    report_stage("two")
    assert stages.new_lines() == ["one", "two"]
    with file.open("a", encoding="utf-8") as half:
        half.write("thr")
    assert stages.new_lines() == []
    with file.open("a", encoding="utf-8") as rest:
        rest.write("ee\n")
    assert stages.new_lines() == ["three"]


def test_without_a_listener_it_is_only_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    report_stage("one")
    assert StageLog.here().new_lines() == []
