"""The frame of `talkray report`: verdicts, resuming, exit codes, secrets, the page; test_faults.py plants faults."""

import errno
import json
import re
import socket
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

from deployments.errors import InvalidRequest
from loadtest.settings import Settings
from loadtest.traces import LoadTestError
from talkray_tools.arguments import run_command
from talkray_tools.report import page
from talkray_tools.report.__main__ import PARTS, report
from talkray_tools.report.bench import ReportBench
from talkray_tools.report.frame import CannotRun, PartResult, ReportFolder, ReportPart, exit_code, run_parts, secrets_of
from talkray_tools.report.speech import most_by_chance, read_seed_tts, termination
from talkray_tools.report.speed import speed
from talkray_tools.spoken_texts import Text
from talkray_tools.verify import Check
from tests.loadtest.servers import peer_server

KEY, HOST = "sk-1234567890", socket.gethostname()
PASSED, FAILED, OPEN = Check("sound", True, "fine"), Check("sound", False, "faint"), Check("start-up", None, "3 s")


class Scripted:
    """Parts that yield checks or raise errors, and count their runs."""

    def __init__(self, **steps: list[Check | BaseException]) -> None:
        self.steps, self.runs, self.only, self.raw = steps, list[str](), list[str](), Path()
        self.parts = [ReportPart(name, self._part(name), name, ("quick",)) for name in steps]

    def say(self, line: str) -> None: ...

    def _part(self, name: str) -> Callable[[Any], Iterator[Check]]:
        def run(bench: Any) -> Iterator[Check]:
            self.runs.append(name)
            for step in self.steps[name]:
                if isinstance(step, BaseException):
                    raise step
                yield step

        return run

    def run(self, folder: Path, **inputs: object) -> list[PartResult]:
        kept = ReportFolder(folder, secrets=secrets_of("http://tts.example:8000", KEY, folder))
        return run_parts(self.parts, self, kept, inputs={"quick": False, **inputs}, only=self.only or list(self.steps))


@pytest.mark.parametrize(("steps", "verdict", "code"), [
    ([PASSED, OPEN], "passed", 0), ([PASSED, FAILED], "failed", 1), ([FAILED, CannotRun("no")], "failed", 1),
    ([PASSED, CannotRun("no")], "could not run", 2), ([ZeroDivisionError("bug")], "could not run", 2),
    ([SystemExit("the package x is missing")], "could not run", 2),
])  # fmt: skip
def test_each_part_has_a_verdict_and_stops_no_other(steps: list[Any], verdict: str, code: int, tmp_path: Path) -> None:
    results = Scripted(one=steps, two=[PASSED]).run(tmp_path)
    assert [result.verdict for result in results] == [verdict, "passed"]
    assert exit_code(results) == code
    assert bool(results[0].why) == any(isinstance(step, BaseException) for step in steps)


@pytest.mark.parametrize(("error", "why"), [
    (OSError(errno.ENOSPC, "no space"), "disk is full"), (MemoryError(), "not enough memory"),
    (RuntimeError("CUDA out of memory"), "not enough memory"), (LoadTestError("nothing answers"), "nothing answers"),
    (ModuleNotFoundError("no", name="faster_whisper"), "pip install 'faster-whisper"),
    (OSError(errno.EROFS, "read-only"), "read-only"),
])  # fmt: skip
def test_the_reason_says_what_to_do(error: Exception, why: str, tmp_path: Path) -> None:
    [result] = Scripted(one=[error]).run(tmp_path)
    assert why in result.why


def test_a_full_disk_is_found_behind_the_error_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0))
    [result] = Scripted(one=[CannotRun("talkray verify ended early: System error.")]).run(tmp_path)
    assert "disk is full" in result.why


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    parts = Scripted(good=[PASSED], bad=[FAILED], missing=[CannotRun("no encoder")], ended=[KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        parts.run(tmp_path)
    (tmp_path / "ended" / "half").write_text("kept")
    parts.steps |= {"missing": [PASSED], "ended": [PASSED]}
    parts.runs.clear()
    assert [each.verdict for each in parts.run(tmp_path)] == ["passed", "failed", "passed", "passed"]
    assert parts.runs == ["missing", "ended"]
    assert (tmp_path / "ended" / "half").exists()


@pytest.mark.parametrize(("inputs", "again"), [
    ({}, False), ({"recogniser": "x"}, False), ({"quick": True}, True), ({"all checkpoint": 2}, True),
])  # fmt: skip
def test_other_inputs_are_measured_anew(inputs: dict[str, object], again: bool, tmp_path: Path) -> None:
    parts = Scripted(one=[PASSED])
    parts.run(tmp_path)
    (tmp_path / "one" / "raw").write_text("old")
    parts.run(tmp_path, **inputs)
    assert (parts.runs == ["one", "one"]) is again
    assert (tmp_path / "one" / "raw").exists() is not again


def test_only_some_parts_run_and_results_of_other_inputs_are_left_out(tmp_path: Path) -> None:
    parts = Scripted(one=[PASSED], two=[FAILED])
    parts.run(tmp_path)
    parts.only = ["one"]
    assert [each.name for each in parts.run(tmp_path)] == ["one", "two"]
    assert [each.name for each in parts.run(tmp_path, quick=True)] == ["one"]
    assert parts.runs == ["one", "two", "one"]


def test_the_folder_has_no_host_path_or_key(tmp_path: Path) -> None:
    secret = (
        f"{HOST}: /root/.cache/voice, {Path.cwd()}/x.json, {tmp_path}/a b, {KEY}, http://tts.example:8000/v1/models"
    )
    parts = Scripted(one=[Check("a", True, secret, {"of": secret}), CannotRun(secret)])
    (tmp_path / "one").mkdir()
    half = f'{json.dumps([secret])}\n{{"half'
    for name, text in (("a.json", json.dumps({"url": secret})), ("b.jsonl", half), ("c.md", secret)):
        (tmp_path / "one" / name).write_text(text)
    results = parts.run(tmp_path)
    for name in ("a.json", "b.jsonl", "c.md"):  # now by a part
        parts.steps["one"] = [FAILED]
        (tmp_path / "one" / name).write_text(json.dumps(secret) if name != "c.md" else secret)
    results = parts.run(tmp_path)
    folder = ReportFolder(tmp_path, secrets=secrets_of("http://tts.example:8000", KEY, tmp_path))
    page.write(results, {"model": secret, "date": "", "machine": secret}, folder, None)
    found = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(found) > 5
    for file in found:
        text = file.read_text()
        for hidden in (HOST, str(Path.cwd()), str(tmp_path), "/root", KEY, "tts.example"):
            assert hidden not in text, (file.name, hidden)
    assert "/v1/models" in (tmp_path / "one" / "c.md").read_text()


def test_what_has_no_bound_says_so_with_values_of_others(tmp_path: Path) -> None:
    [result] = Scripted(one=[Check("capacity", None, "3 per second"), Check("talkray.json", None, "nothing")]).run(
        tmp_path
    )
    assert "no established bound; published values: vLLM-Omni" in result.checks[0].detail
    assert result.checks[1].detail == "nothing"


def test_the_page_holds_all_it_needs_and_compares(tmp_path: Path) -> None:
    parts = Scripted(one=[Check("<b>", False, "it's & that", {"p50_ms": 20.0, "how": "x"})])
    folder = ReportFolder(tmp_path, secrets={})
    about = {"model": "M", "date": "D", "machine": "C", "version": "1", "commit": "c"}
    page.write(parts.run(tmp_path), about, folder, None)
    (tmp_path / "report.json").rename(tmp_path / "before.json")
    parts.steps["one"] = [Check("<b>", True, "fine", {"p50_ms": 30.0})]
    page.write(parts.run(tmp_path, quick=True), about, folder, tmp_path / "before.json")
    text = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;" in text
    assert not [each for each in ("http:", "https:", "<script", "<link") if each in text]
    for cell in ("+50.0%", "differs", "failed", "passed"):
        assert cell in text


@pytest.mark.parametrize(("rate", "c100", "requests", "answer"), [
    (0.0, None, 0, "no. At every tested rate"), (90.5, 0.7, 900, "no, not for mixed traffic. 30% of"),
    (90.5, 0.96, 900, "yes, up to 90.5"), (90.5, None, 900, "yes, up to 90.5"), (0.5, 1.0, 2, "only 2 responses"),
])  # fmt: skip
def test_the_page_has_the_answer(rate: float, c100: float | None, requests: int, answer: str, tmp_path: Path) -> None:
    capacity = {"requests_per_s": rate, "audio_s_per_s": 8 * rate, "requests": requests}
    mixed = Check("first audio, mixed traffic at 9 requests per second", None, "", {"c100": c100})
    results = Scripted(one=[Check("capacity", None, "", capacity), mixed]).run(tmp_path)
    page.write(results, {"model": "M", "machine": "C"}, ReportFolder(tmp_path, secrets={}), None)
    shown = re.sub(r"<[^>]+>", "", (tmp_path / "report.html").read_text())
    assert answer in shown
    assert ("rough estimate" in shown) == (requests == 2)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"parts": [{"name": "x"}]}', '{"parts": 3}'])
def test_what_is_no_report_is_refused_at_once(content: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(content)
    compare = ["--compare", str(tmp_path / "other.json"), "--out", str(tmp_path / "r")]
    with pytest.raises(InvalidRequest, match="not a report"):
        run_command(report, "talkray report", ["--model", "embedded", *compare])
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "use either --model"), (["--model", "embedded", "--url", "http://x"], "use either --model"),
    (["--url", "http://x", "--only", "correctness"], "unknown part. Use: termination"),
])  # fmt: skip
def test_wrong_calls_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        run_command(report, "talkray report", arguments)


@pytest.mark.parametrize(("count", "most"), [(60, 2), (300, 5), (1000, 12)])
def test_chance_is_no_runaway(count: int, most: int) -> None:
    assert most_by_chance(count) == most
    assert most < 0.02 * count or count < 300


@pytest.mark.parametrize(("listed", "why"), [
    (None, "zh/meta.lst are missing"), ("a|b\n", "line 1 of en/meta.lst"), ("a|b|gone.wav|c\n", "line 1"),
    ("a|b|r.wav|c\na|b|r.wav|c\nx", "line 3"), ("a|b|r.wav|c|d\n", ""),
])  # fmt: skip
def test_a_bad_list_is_named(listed: str | None, why: str, tmp_path: Path) -> None:
    (tmp_path / "en").mkdir()
    soundfile.write(tmp_path / "en" / "r.wav", np.zeros(160), 16000)
    if listed is not None:
        (tmp_path / "en" / "meta.lst").write_text(listed)
    if not why:
        [(text, recorded)] = read_seed_tts(tmp_path)["english"]
        assert (text.spoken, recorded.text, len(recorded.audio)) == ("c", "b", 240)
        return
    with pytest.raises(CannotRun, match=why):
        read_seed_tts(tmp_path)


def test_a_server_of_another_maker_is_measured_by_the_same_parts(tmp_path: Path) -> None:
    with peer_server("vllm-omni", first_s=0.0, streams=64) as (url, bodies):
        code = run_command(report, "talkray report", [
            "--url", url, "--dialect", "vllm-omni", "--only", "termination", "--prompts", "4", "--quick",
            "--out", str(tmp_path),
        ])  # fmt: skip
    record = json.loads((tmp_path / "report.json").read_text())
    [part] = record["parts"]
    assert (part["name"], len(bodies)) == ("termination", 6)
    assert code == {"passed": 0, "failed": 1}[part["verdict"]]
    assert url.rpartition(":")[2] not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("ends", "is_set"), [((False, False), True), ((False, True), False), ((), False)])
def test_lengths_are_set_if_nothing_ends(ends: tuple[bool, ...], is_set: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def sweep(bench: object, name: str, settings: Settings, plan: object) -> None:
        raise CannotRun("set" if settings.lengths else "natural")

    monkeypatch.setattr("talkray_tools.report.speed._sweep", sweep)
    checks = {f"speech ends, seed {seed}": Check("", passed, "") for seed, passed in enumerate(ends)}
    options = SimpleNamespace(quick=True, model="m")
    bench: Any = SimpleNamespace(options=options, verified=checks, settings=Settings("http://x"))
    with pytest.raises(CannotRun, match="set" if is_set else "natural"):
        [*speed(bench)]


def test_a_full_report_has_a_thousand_short_and_fifty_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Text] = []
    monkeypatch.setattr("talkray_tools.report.speech._hear", lambda *_, **__: {"english": []})
    monkeypatch.setattr("talkray_tools.report.speech.Text", lambda *fields: asked.append(Text(*fields)))
    options = Namespace(quick=False, prompts=None, dialect="talkray")
    bench: Any = SimpleNamespace(
        options=options, server=SimpleNamespace(languages=("english",)), way=lambda *_, **__: None
    )
    assert not [*termination(bench)]
    assert Counter(text.kind for text in asked) == {"short": 1000, "long": 50}
    assert len({(text.kind, text.number) for text in asked}) == 1050


def test_the_users_recogniser_replaces_whisper(tmp_path: Path) -> None:
    assert ReportBench(Namespace(recogniser="builtins:str"), tmp_path, print).recogniser("en") == "en"  # type: ignore[comparison-overlap]


def test_only_some_parts_need_no_checkpoint() -> None:
    assert [part.name for part in PARTS if part.needs_only_server] == ["termination", "intelligibility", "speed"]
