import json
import logging
import os
from pathlib import Path

import pytest

from deployments.serving.reports import VARIABLE, report_stage, send


def test_what_is_told_is_a_line_of_json_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "told"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setenv(VARIABLE, str(pipe))
    report_stage("one")
    send("request", "two", 3)
    lines = os.read(reader, 4096).decode().splitlines()
    os.close(reader)
    assert [json.loads(line) for line in lines] == [["stage", "one"], ["request", "two", 3]]


def test_without_a_listener_it_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with caplog.at_level(logging.INFO):
        report_stage("one")
    assert caplog.messages == ["one"]
