"""Talker and codec are libraries: both are imported where there is no Ray. Their kernels in C build for other CPUs."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deployments.codec.backends import c_kernels
from deployments.embedded_voice import cpu_networks
from deployments.talker.sampling import torch_sampler

ROOT = Path(__file__).parents[2]
EXTENSIONS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["ext-modules"]
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


# The libraries of C, and the functions that Python calls.
C_FILES = {
    "codec/backends/c_kernels.c": {"matrix_units", *c_kernels._PARAMETERS},
    "embedded_voice/cpu_networks.c": {"suits", *cpu_networks._PARAMETERS},
    "talker/sampling/c_sampler.c": {"option_columns", *torch_sampler._PARAMETERS},
}
COMPILERS = [
    pytest.param("aarch64-linux-gnu-gcc", "", id="aarch64"),
    pytest.param("gcc", "", id="any x86-64"),
    pytest.param("gcc", "-march=x86-64-v3 -DTALKRAY_ONE_CPU", id="one x86-64"),
]


@pytest.mark.parametrize(("compiler", "options"), COMPILERS)
@pytest.mark.parametrize("file", C_FILES)
def test_every_compiler_builds_what_python_calls(file: str, compiler: str, options: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}: make cross-compilers")
    extension = next(each for each in EXTENSIONS if each["sources"] == [f"deployments/{file}"])
    libraries = [f"-l{name}" for name in extension.get("libraries", [])]
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *extension["extra-compile-args"], "-O1"]
    built = tmp_path / "library.so"
    subprocess.run([*command, *options.split(), ROOT / "deployments" / file, "-o", built, *libraries], check=True)
    symbols = subprocess.run(["nm", "-D", "--defined-only", built], capture_output=True, text=True, check=True).stdout
    assert {"interface", *C_FILES[file]} <= {line.split()[-1] for line in symbols.splitlines()}
    assert "TALKRAY_ONE_CPU" not in options or not re.search(" i ", symbols), "no function is chosen at run time"
