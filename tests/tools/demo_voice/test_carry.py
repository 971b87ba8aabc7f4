from pathlib import Path

import pytest
import torch

from tools.demo_voice import carry


@pytest.mark.parametrize("part", [1000, 14_000_000])
def test_what_was_packed_comes_back(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "_PART", part)
    run, kept, back = tmp_path / "run", tmp_path / "kept", tmp_path / "back"
    (run / "codec").mkdir(parents=True)
    (run / "codes.i16").write_bytes(torch.randint(256, (5000,), dtype=torch.uint8).numpy().tobytes())
    (run / "audio.i16").write_bytes(b"too large")
    weights = {"model": {"table": torch.arange(10)}}
    torch.save(weights | {"optimizer": {}}, run / "codec" / "latest.pt")

    carry.pack(run, kept)
    carry.unpack(kept, back)

    assert all(file.stat().st_size <= part for file in kept.iterdir())
    assert (back / "codes.i16").read_bytes() == (run / "codes.i16").read_bytes()
    assert not (back / "audio.i16").exists()
    restored = torch.load(back / "codec" / "weights.pt", weights_only=True)
    assert restored.keys() == {"model"}
    torch.testing.assert_close(restored["model"], weights["model"])
