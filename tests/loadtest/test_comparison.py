import asyncio
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from loadtest import comparison
from loadtest.__main__ import app
from loadtest.arrivals import Phase, ScheduledRequest, place
from loadtest.comparison_page import verdict
from loadtest.dialects import DIALECTS
from loadtest.measure import Result, without_headers
from loadtest.metrics import Limits
from loadtest.options import of_side, settings_from_options, side_settings
from loadtest.settings import Settings
from tests.loadtest.servers import peer_server
from tests.loadtest.test_metrics import SPOKEN

REQUEST = ScheduledRequest(0, 0.0, "Hi.", frames=10)


SPEECH = "/v1/audio/speech"
PLAIN: dict[str, object] = {"model": "m", "voice": "v", "input": "Hi.", "response_format": "pcm", "seed": 1}


@pytest.mark.parametrize(("dialect", "path", "body"), [
    ("talkray", SPEECH, PLAIN | {"max_new_tokens": 11, "ignore_eos": True}),
    ("openai", SPEECH, PLAIN),
    ("vllm-omni", SPEECH, PLAIN | {"stream": True, "stream_format": "audio"}),
    ("sglang-omni", SPEECH, PLAIN | {"stream": True}),
    ("nari", SPEECH, PLAIN | {"stream": True, "non_streaming_mode": False}),
    ("voxserve", "/generate", {"text": "Hi.", "speaker": "v", "streaming": "true", "seed": 1}),
    (
        "elevenlabs", "/v1/text-to-speech/v/stream?output_format=pcm_24000",
        {"text": "Hi.", "model_id": "m", "seed": 1},
    ),
])  # fmt: skip
def test_each_maker_is_asked_in_its_own_form(dialect: str, path: str, body: dict[str, object]) -> None:
    settings = Settings("http://h:1/v1", dialect=dialect, options={"model": "m", "voice": "v", "seed": 1})
    assert settings.speech_url == f"http://h:1{path}"
    assert settings.body(REQUEST) == body


def test_a_server_is_named_with_its_dialect() -> None:
    given = {"voice": "v", "model": "m", "extra": "{}", "headers": ["xi-api-key: k"], "speech_s": 2.0}
    plain, other = (side_settings(said, **given) for said in ("http://h:1/?a=b", "nari=http://h:2"))
    assert (plain.dialect, plain.url, plain.lengths is None) == ("talkray", "http://h:1/?a=b", False)
    assert (other.dialect, other.url, other.lengths) == ("nari", "http://h:2", None)
    assert other.headers == {"xi-api-key": "k"}


@pytest.mark.parametrize(
    ("said", "wrong"), [("kokoro=http://h:1", "'kokoro' is not a dialect"), ("nari=h:1", "not a URL")]
)
def test_another_name_is_refused_with_the_names_that_there_are(said: str, wrong: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compare", said, "http://h:1", "--rate", "1", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert wrong in " ".join(done.output.replace("│", " ").split())


def test_an_option_is_for_both_or_for_each() -> None:
    assert [of_side(values, number, "x") for values in (None, ["a"], ["a", "b"]) for number in (0, 1)] == [
        *("x", "x"), *("a", "a"), *("a", "b"),
    ]  # fmt: skip


@pytest.fixture
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "ROUND_S", 0.4)
    monkeypatch.setattr(comparison, "ROUNDS", 1)
    monkeypatch.setattr(comparison, "LEAVERS", 2)


@pytest.mark.usefixtures("_brief")
def test_two_peers_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_RECOGNISER", "no_such_recogniser")
    out = tmp_path / "out"
    with (
        peer_server("elevenlabs", first_s=0.001, streams=1, full=429) as (first, said_a),
        peer_server("voxserve", first_s=0.15, streams=1, full=503) as (second, said_b),
    ):
        given = (
            "--rate 10 --duration 0.4 --settle 0 --turns 2 --overload 5 --overload-s 0.2 --words 1 --warmup 0 --seed 3"
        )
        named = ["--voice", "rachel", "--voice", "serena", "--header-a", "xi-api-key: k"]
        asked = ["compare", f"elevenlabs={first}", f"voxserve={second}", *given.split(), *named]
        done = CliRunner().invoke(app, [*asked, "--out", str(out)])
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    for row in (
        "answered 429", "answered 503", "TTFA p50/p95/p99", "just after 2 clients left",
        "words misrecognised",
    ):  # fmt: skip
        assert row in shown
    assert "First audible sample at p95: A " in shown
    texts = {letter: (out / f"{letter}-turn-1" / "schedule.jsonl").read_text() for letter in "AB"}
    assert texts["A"] == texts["B"]
    assert texts["A"] != (out / "A-turn-2" / "schedule.jsonl").read_text()
    page = (out / "report.html").read_text()
    assert page.count(f"A: elevenlabs, {first}") > 2
    assert "xi-api-key: k" not in page
    assert json.loads(said_a[0]).keys() == {"text", "model_id"}
    assert b"serena" in said_b[0]


async def _one_of_four(*_: object) -> dict[str, int]:
    return {"errors": 1, "words": 4}


def test_words_are_heard_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hearing = tmp_path / "hearing.py"
    hearing.write_text('import json\nprint("loading")\nprint(json.dumps({"text": "x", "errors": 1, "words": 4}))\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(comparison, "_RECOGNISER", "hearing")
    with peer_server("vllm-omni", first_s=0.0, streams=4) as (url, _):
        settings = Settings(url, dialect="vllm-omni", options={"model": "m", "voice": "v"})
        heard = asyncio.run(comparison._hear(settings, 2, comparison.TraceFolder(tmp_path / "words")))
        with monkeypatch.context() as patched:
            patched.setattr(comparison, "_recognise", _one_of_four)
            most = asyncio.run(comparison._hear(settings, 50, comparison.TraceFolder(tmp_path / "most")))  # of 35 texts
    assert heard == comparison.WordsHeard(errors=2, words=8, answers=2)
    assert most == comparison.WordsHeard(errors=50, words=200, answers=50)
    assert (tmp_path / "words" / "0.wav").stat().st_size > 14000
    hearing.write_text("raise SystemExit('broken')\n")
    failed = asyncio.run(comparison._recognise(tmp_path / "none.wav", "Hi."))
    assert failed == "the recogniser failed: broken"
    hearing.unlink()
    assert "no recogniser is installed" in asyncio.run(comparison._recognise(tmp_path / "none.wav", "Hi."))


def test_dialects_are_those_that_the_options_list() -> None:
    parameter = inspect.signature(settings_from_options).parameters["dialect"]
    assert get_args(get_args(parameter.annotation)[0]) == tuple(DIALECTS)


def compared(letter: str, later_s: tuple[float, ...]) -> comparison.Compared:
    """Turns whose answers come so much later than SPOKEN."""
    turns = []
    for late_s in later_s:
        chunks = [(arrival_s + late_s, size) for arrival_s, size in SPOKEN.chunks]
        first_s = (SPOKEN.first_byte_s or 0.0) + late_s
        trace = replace(SPOKEN, first_byte_s=first_s, chunks=chunks, finished_s=SPOKEN.finished_s + late_s)
        phases = place([Phase("load", 1.0, 30.0)])
        turns.append(Result(f"turn {late_s}", {}, phases, Limits(), [trace], [], 1))
    side = comparison.Side(letter, Settings("http://h:1"))
    return comparison.Compared(side, turns, None, comparison.Leaving(8, [0.1], [0.2], 0), "not measured")


@pytest.mark.parametrize(("first", "second", "said"), [
    ((0.0, 0.01, 0.0), (0.05, 0.08, 0.06), "A was faster in every turn"),
    ((0.05, 0.08, 0.06), (0.0, 0.01, 0.0), "B was faster in every turn"),
    ((0.0, 0.06, 0.0), (0.05, 0.08, 0.06), "the difference is not significant"),
    ((0.0, 0.01, 0.0), (0.02, 0.08, 0.02), "the difference is not significant"),
    ((0.0, 0.0), (0.05, 0.05), "fewer than 3 turns do not show this"),
])  # fmt: skip
def test_one_is_sooner_where_all_its_turns_are(first: tuple[float, ...], second: tuple[float, ...], said: str) -> None:
    plan = comparison.TurnPlan(1.0, 30.0, 0.0, len(first), 0.0, 1.0, 0)
    assert said in verdict([compared("A", first), compared("B", second)], plan)


def test_a_late_client_and_a_silent_server_allow_no_comparison() -> None:
    late = compared("A", (0.0, 0.0, 0.0))
    late.turns[1].traces[0].sent_s += 0.2
    plan = comparison.TurnPlan(1.0, 30.0, 0.0, 3, 0.0, 1.0, 0)
    assert "this client was late" in verdict([late, compared("B", (0.5, 0.5, 0.5))], plan)
    silent = replace(compared("A", (0.0,)), turns=[])
    assert "no audible audio" in verdict([silent, compared("B", (0.0,))], replace(plan, turns=1))


def test_the_values_of_headers_are_in_no_result() -> None:
    given = ["compare", "A", "--header-a", "xi-api-key: k", "--header=Authorization: Bearer x", "--rate", "1"]
    assert without_headers(given) == ["compare", "A", "--header-a", "...", "--header=...", "--rate", "1"]
