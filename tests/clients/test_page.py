"""The page at `/`: what its Stop button does, and how it lists voices."""

import json
import subprocess
from pathlib import Path

PAGE = Path(__file__).parents[2] / "serve_app" / "api" / "pages" / "playground.html"
SCRIPT = Path(__file__).with_name("scripts") / "page.mjs"
HEADER_BYTES, SECOND_BYTES = 44, 48_000


def test_stop_throws_nothing_and_keeps_what_has_come() -> None:
    done = subprocess.run(["node", SCRIPT, PAGE], capture_output=True, text=True, check=True, timeout=60)
    told = json.loads(done.stdout)
    assert told["thrown"] == []
    assert told["stopped"] == {
        "state": "Stopped. 1.0 s can be saved.",
        "bytes": HEADER_BYTES + SECOND_BYTES,
        "hidden": False,
        "speak": False,
    }
    assert "1.0 s in all" in told["again"]
    assert told["options"] == ["Nora", "Alloy is Nora"]
