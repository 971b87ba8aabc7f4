import json
import logging
import threading
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from deployments.serving import metrics
from serve_app.api.request_record import RequestRecord, Usage
from serve_app.extensions.records import record_keeper
from serve_app.extensions.records.record_keeper import RecordKeeper, RequestLines


def record(request_id: str) -> RequestRecord:
    return RequestRecord(request_id, 0, error="x")


def ids(file: Path) -> list[str]:
    return [json.loads(line)["id"] for line in file.read_text().splitlines()]


class Sink:
    """Whether it was given a record, and flushed; each flush fails with the `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.taken, self.flushed, self._error = threading.Event(), threading.Event(), error

    def receive(self, record: RequestRecord) -> None:
        self.taken.set()

    def flush(self, *, is_last: bool) -> None:
        self.flushed.set()
        if self._error is not None:
            raise self._error


def test_a_line_is_in_its_file_at_once(tmp_path: Path) -> None:
    lines = RequestLines(tmp_path, "Ingress#1")
    lines.receive(record("one"))
    [file] = tmp_path.iterdir()
    assert ids(file) == ["one"]
    lines.flush(is_last=True)


def test_a_file_has_a_size_and_the_oldest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_keeper, "_FILE_BYTES", 1)
    lines = RequestLines(tmp_path, "Ingress#1")
    for number in range(6):
        lines.receive(record(str(number)))
    lines.flush(is_last=True)
    files = sorted(tmp_path.iterdir())
    assert [ids(file) for file in files] == [["5"], ["4"], ["3"], ["2"]]
    assert not any(file.stat().st_mode & 0o77 for file in files)


def test_lines_go_on_after_files_could_not_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(record_keeper, "_FILE_BYTES", 1)
    lines = RequestLines(tmp_path, "Ingress#1")
    lines.receive(record("before"))
    with monkeypatch.context() as full, caplog.at_level(logging.ERROR):
        full.setattr("os.rename", refuse)
        keeper = RecordKeeper([lines, other := Sink()])
        keeper.receive(record("lost"))
        keeper.close()
    assert "request lost: its record was not stored by RequestLines" in caplog.text
    assert other.taken.is_set()
    lines.receive(record("after"))
    lines.flush(is_last=True)
    assert [ids(file) for file in sorted(tmp_path.iterdir())] == [["after"], ["before"]]


def test_a_sink_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else records would be kept in memory for ever."""
    monkeypatch.setattr(record_keeper, "HAND_ON_S", 0.01)
    monkeypatch.setattr(record_keeper, "FLUSH_S", 0.0)
    keeper = RecordKeeper([sink := Sink(ValueError("no sink"))])
    assert sink.flushed.wait(30)
    told = Mock()
    monkeypatch.setattr(metrics.STAGES, "record", told)
    usage = Usage(marks=(("received", 10**9), ("request", 10**9 + 5 * 10**6), ("codec", 3 * 10**9)))
    keeper.receive(RequestRecord("one", 0, usage=usage))
    assert sink.taken.wait(30)
    keeper.close()
    assert told.call_args_list == [call(0.005, stage="request"), call(1.995, stage="codec")]
