"""Warnings are errors, and yet the first failure of a run is what its output shows."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = """
import gc, subprocess, pytest

def start():
    left = subprocess.Popen(["sleep", "1"])
    raise RuntimeError("the first failure")

server = pytest.fixture(start)
def test_setup(server): pass
def test_call(): start()
def test_later(): gc.collect()
"""


def test_a_process_that_a_failed_test_leaves_is_no_error_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(CODE)
    options = ["-q", "-p", "tests.conftest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, tmp_path]
    run = subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True)
    counts = run.stdout.splitlines()[-1]  # with the number of warnings, if the processes still run
    assert re.match(r"1 failed, 1 passed, (\d+ warnings?, )?1 error in", counts), run.stdout
    assert "the first failure" in run.stdout
    assert "Exception ignored" not in run.stdout + run.stderr
