"""A run of the tests says what it skipped, and why."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_skipped_modules_are_listed_with_their_reasons(tmp_path: Path) -> None:
    module = tmp_path / "test_elsewhere.py"
    module.write_text("import pytest\npytest.importorskip('no_such', reason='needs no_such: make such')\n")
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path]
    options = ["-q", "-p", "no:cacheprovider", "-n0", module]
    said = subprocess.run([*command, *options], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert "test_elsewhere.py:2: needs no_such: make such" in said.stdout
