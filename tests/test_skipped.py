"""A run of the tests says what it skipped, and why, and what failed first."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


LEFT = """
import gc, subprocess, sys
def test_first():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    end = process.stdin.close
    del process
    gc.collect()
    end()
    assert False, "the cause"
"""


def run(module: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", module.parent]
    options = ["-q", "-p", "no:cacheprovider", "-n0", module]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, cwd=module.parent, timeout=120, check=False
    )
    return done.stdout


def test_a_process_that_a_failure_left_does_not_hide_the_failure(tmp_path: Path) -> None:
    module = tmp_path / "test_left.py"
    module.write_text(LEFT)
    said = run(module)
    assert "AssertionError: the cause" in said
    assert "is still running" in said
    assert "PytestUnraisableExceptionWarning" not in said
    assert "1 failed, 1 warning" in said


def test_skipped_modules_are_listed_with_their_reasons(tmp_path: Path) -> None:
    module = tmp_path / "test_elsewhere.py"
    module.write_text("import pytest\npytest.importorskip('no_such', reason='needs no_such: make such')\n")
    assert "test_elsewhere.py:2: needs no_such: make such" in run(module)
