import json
from pathlib import Path

import pytest

from deployments.codec.backends.torch_backend import TorchBackend
from talkray_tools.bench_codec import main


def test_the_benchmark_runs(tmp_path: Path) -> None:
    precisions = ["--precision", "float32", "bfloat16"]  # also on a CPU that has no units for bfloat16
    main(["--smoke", *precisions, "--out", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    timed = [row for row in rows if "cpu_ms" in row]
    assert [(row["precision"], row["streams"], row["frames"]) for row in timed] == [
        ("float32", 1, 1),
        ("bfloat16", 1, 1),
    ]
    assert timed[1]["snr_db"] > 25
    assert all(row["silent_ms"] > 0 for row in timed)


@pytest.mark.parametrize("available", [(), ("bfloat16",)])
def test_what_a_cpu_lacks_is_left_out(
    available: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TorchBackend, "precisions", staticmethod(lambda device: available))
    main(["--smoke"])
    printed = capsys.readouterr().out
    assert ("bfloat16, SNR" in printed) == bool(available)
    assert ("skipping bfloat16: this CPU has neither AVX512-BF16 nor AMX" in printed) != bool(available)


def test_a_checkpoint_that_is_not_there_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "/nowhere/at/all"])
    assert "checkpoint directory /nowhere/at/all does not exist" in capsys.readouterr().err


def test_the_embedded_voice_is_measured(tmp_path: Path) -> None:
    main(["--smoke", "--model", "embedded", "--precision", "bfloat16", "--out", str(tmp_path / "rows.json")])
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 1
