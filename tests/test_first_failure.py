"""The output of a run shows its first failure, although warnings are errors, and why modules were skipped."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = """
import gc, socket, subprocess, pytest

def start():
    left = socket.socket()
    raise RuntimeError("the first failure")

server = pytest.fixture(start)
def test_collected_at_once(): subprocess.Popen(["sleep", "1"])
def test_setup(server): pass
def test_call(): start()
def test_later(): gc.collect()
"""


def run(module: Path) -> "subprocess.CompletedProcess[str]":
    options = ["-q", "-p", "tests.conftest", "-c", ROOT / "pyproject.toml", "--rootdir", module.parent, module]
    return subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True)


def test_what_a_failed_test_leaves_open_is_no_error_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(CODE)
    done = run(tmp_path / "test_it.py")
    assert re.match("1 failed, 2 passed, 1 warning, 1 error in", done.stdout.splitlines()[-1]), done.stdout
    assert "the first failure" in done.stdout
    assert "is still running" in done.stdout
    assert "Exception ignored" not in done.stdout + done.stderr


def test_skipped_modules_are_listed_with_their_reasons(tmp_path: Path) -> None:
    module = tmp_path / "test_elsewhere.py"
    module.write_text("import pytest\npytest.importorskip('no_such', reason='needs no_such: make such')\n")
    assert "test_elsewhere.py:2: needs no_such: make such" in run(module).stdout
