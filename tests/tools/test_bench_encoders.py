import json
from pathlib import Path

import pytest

from serve_app.audio.formats import AudioFormat
from talkray_tools.bench_encoders import FORMATS, main, speech_like, until_first_ms


def test_the_table_and_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--seconds", "0.5", "--runs", "1", "--out", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == len(FORMATS) == len(capsys.readouterr().out.splitlines()) - 2
    assert all(row["cpu_ms_per_s"] > 0 for row in rows)
    raw = next(row for row in rows if row["format"] == "pcm")
    assert raw["kbit_per_s"] == pytest.approx(384)


# Ours to keep: what a listener waits for besides the first frame.
@pytest.mark.parametrize(("audio_format", "most_ms"), [
    (AudioFormat.PCM, 5), (AudioFormat.WAV, 5), (AudioFormat.OPUS, 80), (AudioFormat.MP3, 140),
    (AudioFormat.AAC, 140),
])  # fmt: skip
def test_first_bytes_need_little_audio(audio_format: AudioFormat, most_ms: float) -> None:
    until_ms = until_first_ms(audio_format, None, speech_like(1.0))
    assert until_ms is not None
    assert until_ms <= most_ms
