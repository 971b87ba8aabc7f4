from pathlib import Path

import pytest

from tools.experiments.peers import BY_DESIGN, SUITES, PeerResult, main, reason_of, run_all

PAGE = (Path(__file__).parents[2] / "docs/clients.md").read_text()


@pytest.mark.parametrize("arguments", [[], ["/nowhere"], ["/dev/null"]])
def test_without_a_folder_it_says_how_to_get_them(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    explained = capsys.readouterr().err
    assert all(f"https://github.com/{suite.repository}" in explained for suite in SUITES)


def test_a_suite_that_is_not_there_is_listed_as_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all(tmp_path, "http://127.0.0.1:9") == 0
    assert capsys.readouterr().out.count(": not run, ") == len(SUITES)


@pytest.mark.parametrize(("suite", "name", "is_known"), [
    ("Kokoro-FastAPI", "test_tts_roundtrip[voice-es]", True),
    ("Kokoro-FastAPI", "test_tts_roundtrip[voice-en]", False),
    ("Kokoro-FastAPI", "test_speed_param_scales_duration", False),
    ("chatterbox-tts-api", "test_missing_input_json", True),
    ("chatterbox-tts-api", "test_tts_json_with_various_texts[short]", False),
    ("benchmarks", "nari-http-0", False),
])  # fmt: skip
def test_only_what_is_by_design_may_fail(suite: str, name: str, is_known: bool) -> None:
    assert (reason_of(suite, PeerResult(name, "failed")) is not None) == is_known


def test_the_page_names_each_suite() -> None:
    assert [suite.name for suite in SUITES if suite.repository not in PAGE] == []
    assert set(BY_DESIGN) <= {suite.name for suite in SUITES}
