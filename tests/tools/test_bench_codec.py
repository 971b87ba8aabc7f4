import json
from pathlib import Path

from talkray_tools.bench_codec import main


def test_the_benchmark_runs(tmp_path: Path) -> None:
    main(["--smoke", "--threads", "2", "--out", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    timed = [row for row in rows if "cpu_ms" in row]
    assert [(row["precision"], row["streams"], row["frames"]) for row in timed] == [
        ("float32", 1, 1),
        ("bfloat16", 1, 1),
    ]
    assert timed[1]["snr_db"] > 25
    assert all(row["silent_ms"] > 0 for row in timed)
