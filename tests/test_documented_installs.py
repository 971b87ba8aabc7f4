"""What the documents have a reader install leaves an editable checkout editable: a copy would ignore every edit."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "cluster/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]  # fmt: skip
MADE = re.findall(r"^\t\$\(PIP\) (.*--editable.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
COMMANDS = sorted(
    {f"pip install {arguments}" for arguments in MADE}  # of `make install` and `make lint`
    | {
        line.partition("#")[0].strip().removeprefix(".venv/bin/")
        for document in DOCUMENTS
        for block in re.findall(
            r"^```[^\n]*\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
        for line in block.splitlines()
        if ".whl" not in line  # a release, in an environment of its own
        and re.match(r"(\.venv/bin/)?(python -m )?pip install\b.*talkray|.*pip install\b.*\.\[|.*pip install \.", line)
    }
)
LOCATION = "import serve_app; print(serve_app.__path__[0])"


def checkout(folder: Path) -> Path:
    """What an install reads of the checkout."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("serve_app", "deployments", "loadtest", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "packed"))
    return folder


def pip(folder: Path, arguments: str) -> None:
    """Run there, by the environment of a checkout."""
    settings = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0: there is none
    settings["CC"] = "false"  # the kernels are optional, and take long to compile
    line = f"venv/bin/python -m pip --quiet --disable-pip-version-check {arguments}"
    subprocess.run(["bash", "-c", line], cwd=folder, env=os.environ | settings, check=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout, which `make install` has installed into an environment of its own."""
    folder = checkout(tmp_path_factory.mktemp("checkout"))
    venv.create(folder / "venv", symlinks=True)
    [site] = folder.glob("venv/lib/python*/site-packages")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "zz_build.pth").write_text("\n".join(packages), encoding="utf-8")  # setuptools and pip, without the network
    pip(folder, "install --editable .")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_the_location_is_still_the_checkout(installed: Path, command: str) -> None:
    pip(installed, command[command.index("install") :])
    home = installed / "venv"
    located = subprocess.check_output([home / "bin/python", "-c", LOCATION], cwd=home, text=True)
    assert Path(located.strip()) == installed / "serve_app"


def test_the_documents_install_something() -> None:
    assert any("--editable" in command for command in COMMANDS), COMMANDS
