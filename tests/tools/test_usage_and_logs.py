import csv
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from ray.exceptions import AuthenticationError
from ray.util import state
from typer.testing import CliRunner, Result

from deployments.errors import InvalidRequest, TalkrayError
from serve_app.api.request_record import RequestRecord, Usage
from serve_app.extensions.records.record_keeper import LINES, RecordKeeper, RequestLines
from serve_app.extensions.records.request_lines import story_of
from serve_app.extensions.records.usage_counts import UsageBook
from serve_app.extensions.voices.voice_store import VoiceStore
from talkray_tools.logs import logs
from talkray_tools.usage import _first_hour, usage


def spoken(request_id: str, key: str = "ada", voice: str = "ryan", characters: int = 12) -> RequestRecord:
    marks = (("received", 1_000_000), ("request", 3_500_000), ("codes", 9_000_000))
    trail = (("Talker#1", 1), ("Codec#1", 2), ("TalkerLost", 3), ("Talker#2", 4), ("Codec#1", 5))
    usage = Usage(frames=25, samples=48_000, seed=7, model="m", voice=voice, marks=marks, trail=trail)
    record = RequestRecord(request_id, 1_000_000, key=key, dialect="OpenAI", characters=characters, usage=usage)
    record.samples_per_s, record.ended_ns = 24_000, 2_001_000_000
    return record


def run(name: str, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()({"logs": logs, "usage": usage}[name])
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What two ingress replicas have kept: lines on this machine, and usage in a store."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("TALKRAY_VOICES", str(tmp_path / "store"))
    records = [spoken("one"), spoken("one-2"), spoken("one-2x"), spoken("two", "bob, of x", "vivian", 400)]
    for number, node in enumerate(("ray", "talkray-abc/ray")):
        lines = RequestLines(tmp_path / node / "session_2026-11-26/logs/serve", f"Ingress#{number}")
        keeper = RecordKeeper([lines, UsageBook(VoiceStore(str(tmp_path / "store")), time.time)])
        for each in records[2 * number : 2 * number + 2]:
            keeper.receive(each)
        keeper.close()
    return tmp_path


def test_a_request_and_the_turns_of_its_socket_are_found(kept: Path) -> None:
    shown = run("logs", "one").stdout
    assert shown.count("Ingress#0 > Talker#1 > Codec#1 > TalkerLost > Talker#2") == 2
    assert "m, seed 7, OpenAI: 12 characters, 25 codes, 2000 ms in total" in shown
    assert "ms to first audio: request 2.5, codes 5.5" in shown
    assert [json.loads(line)["id"] for line in run("logs", "one", "--json").stdout.splitlines()] == ["one", "one-2"]
    assert json.loads(run("logs", "two", "--json").stdout)["ingress"] == "Ingress#1"
    with pytest.raises(TalkrayError, match="request three is not in the logs"):
        run("logs", "three", "--here")


def test_other_nodes_are_asked_where_this_one_has_no_line(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "\n".join(json.dumps(story_of(spoken(name)) | {"ingress": "Ingress#9"}) for name in ("far", "other")) + "\n"
    nodes = {"node 1": [], "node 2": [f"serve/{LINES}Ingress_9.jsonl"]}
    monkeypatch.setattr(state, "list_nodes", lambda **_: [SimpleNamespace(node_id=name) for name in nodes])
    monkeypatch.setattr(state, "list_logs", lambda *, node_id, glob_filter: {"internal": nodes[node_id]})
    monkeypatch.setattr(state, "get_log", lambda **_: iter((lines[:100], lines[100:])))  # cut anywhere
    assert json.loads(run("logs", "far", "--json").stdout)["ingress"] == "Ingress#9"
    with pytest.raises(TalkrayError, match="request near is not in the logs"):
        run("logs", "near")
    monkeypatch.setattr(state, "list_nodes", lambda **_: (_ for _ in ()).throw(ConnectionError("no Ray is here")))
    with pytest.raises(TalkrayError, match=r"dashboard is unavailable: no Ray is here\. Run the command on a node"):
        run("logs", "near")
    monkeypatch.setattr(state, "list_nodes", lambda **_: (_ for _ in ()).throw(AuthenticationError("Forbidden")))
    message = r"does not accept this command's token\. Set RAY_AUTH_MODE=token, and RAY_A"
    with pytest.raises(TalkrayError, match=message):
        run("logs", "near")


def test_usage_adds_up_the_files_of_all_processes(kept: Path) -> None:
    [head, *rows] = csv.reader(run("usage", "--csv").stdout.splitlines())
    assert head == ["key", "requests", "characters", "audio_s", "codes", "refused", "failed"]
    assert rows == [["bob, of x", "1", "400", "2.0", "25", "0", "0"], ["ada", "3", "36", "6.0", "75", "0", "0"]]
    table = run("usage", "--by", "voice,dialect").stdout.splitlines()
    assert [row.split()[:3] for row in table[1:]] == [["vivian", "OpenAI", "1"], ["ryan", "OpenAI", "3"]]
    assert run("usage", "--since", "2999-01-01", "--csv").stdout.splitlines() == [",".join(head)]


def test_since_when() -> None:
    now_s = 1_793_606_400.0 + 1800  # 2026-11-02T08:30
    assert time.strftime("%H:%M", time.gmtime(now_s)) == "08:30"
    assert _first_hour("1h", now_s) == "2026-11-02T07"
    assert _first_hour("7d", now_s) == "2026-10-26T08"
    assert _first_hour("2026-11-01", now_s) == "2026-11-01"
    for wrong in ("", "h", "yesterday", "7 d", "2026-11"):
        with pytest.raises(InvalidRequest, match="--since"):
            _first_hour(wrong, now_s)


def test_rows_by_something_unknown() -> None:
    with pytest.raises(InvalidRequest, match="'client' is unknown"):
        run("usage", "--by", "client")
