"""Talker and codec are libraries: both are imported where there is no Ray."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# All modules of a folder in one process; those of a GPU are tried where Triton is.
IMPORT = """
import importlib, sys
sys.modules["ray"] = None
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
"""


@pytest.mark.parametrize("library", ["talker", "codec"])
def test_a_library_is_imported_without_ray(library: str) -> None:
    files = sorted((ROOT / "deployments" / library).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.name != "deployment.py"]
    assert names
    done = subprocess.run([sys.executable, "-c", IMPORT, *names], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
