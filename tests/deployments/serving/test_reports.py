import logging
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.serving import ray_private
from deployments.serving.reports import VARIABLE, Start, report_stage, start_key
from deployments.talker import deployment
from deployments.talker.deployment import StartNotes


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


def test_each_start_of_a_pool_leaves_a_note_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: dict[str, bytes] = {}
    clock = SimpleNamespace(time=lambda: now_s)
    monkeypatch.setattr(deployment, "time", clock)
    monkeypatch.setattr(ray_private, "put_note", notes.__setitem__)
    monkeypatch.setattr(ray_private, "get_note", notes.get)

    def note() -> Start | None:
        return Start.read(notes.get(start_key("talkray", "Talker-base")))

    now_s = 100.0
    with StartNotes():
        assert notes == {}, "outside Serve"
    monkeypatch.setattr(ray_private, "this_replica", lambda: "replica")
    context = SimpleNamespace(app_name="talkray", deployment="Talker-base")
    monkeypatch.setattr(deployment.serve, "get_replica_context", lambda: context)
    with StartNotes() as first:
        assert note() == Start(100.0)
        first.report("compiling")
        assert note() == Start(100.0, "compiling")
        now_s = 130.0
    assert note() == Start(100.0, "compiling", 30.0)
    for is_asleep in (True, False):
        first.sleep(is_asleep)
        assert note() == Start(100.0, "compiling", 30.0, is_asleep=is_asleep)
    now_s = 200.0
    with suppress(ValueError), StartNotes():
        assert note() == Start(200.0, usual_s=30.0)
        raise ValueError("no memory")
    assert note() == Start(200.0, failed="no memory", usual_s=30.0)
    with StartNotes():
        assert note() == Start(200.0, usual_s=30.0), "a failed start says nothing of how long one takes"
