import logging
import os
from pathlib import Path

import pytest

from deployments.serving.reports import VARIABLE, report_stage


def test_without_a_listener_it_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with caplog.at_level(logging.INFO):
        report_stage("one")
    assert caplog.messages == ["one"]


@pytest.mark.parametrize("has_reader", [True, False])
def test_a_full_or_unread_pipe_loses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_reader: bool) -> None:
    os.mkfifo(pipe := tmp_path / "told")
    monkeypatch.setenv(VARIABLE, str(pipe))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) if has_reader else None
    for _ in range(300 if has_reader else 1):
        report_stage("x" * 1000)
    if reader is not None:
        assert len(os.read(reader, 1 << 20)) < 300_000
        os.close(reader)
