import json
from pathlib import Path

import pytest

from talkray_tools.bench_engine import main


def test_a_smoke_run_fills_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--smoke", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert [step["batch"] for step in report["steps"]] == [1, 2]
    asked = [(prefill["prompts"], prefill["tail_frames"]) for prefill in report["prefills"]]
    assert asked == [(1, 0), (2, 0), (1, 12), (1, 25)]
    assert set(report["startup_s"]) >= {"loading the talker", "speaking a warm-up"}
    assert all(step["device"] > 0 and step["floor"] > 0 for step in report["steps"])
    assert "ms per frame step" in capsys.readouterr().out
