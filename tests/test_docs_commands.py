"""Commands of the documents run as they are printed: in a fresh shell, at the root of a fresh clone.

What stands behind `sh` in the first line of a block says how:

- nothing: it ends at once, and `make test` runs it. `make docs` runs it too, and
- `slow`: it ends by itself, in minutes;
- `serves`: it serves on port 8000 until Ctrl-C;
- `served`: it needs the server of README's first block (a block of `python` as well);
- `measures`: as `served`, and its status is 1 where this machine was too busy to speak everything;
- `deploys`: it leaves a node of Ray behind, which speaks on port 8000.

These need what a machine with two cores and a checkout has not, so that nothing here runs them:

- `gpu`: an NVIDIA GPU, or released weights, which are gigabytes on a model hub;
- `cluster`: other machines, an account at a cloud, or root and the programs that keep one (docker, systemd, kubectl);
- `suite`: ten minutes to hours, and some of it packages and models from the network. It is a suite or an experiment of
  this project, `talkray verify` among them, which runs its own commands and is judged by its own result.
"""

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
import venv
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.suites.processes import MARK, end_marked

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "cluster/README.md", "tools/demo_voice/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
RUN = ("", "slow", "serves", "served", "measures", "deploys")
NOT_RUN = ("gpu", "cluster", "suite")
URL = "http://127.0.0.1:8000"
BOUND_S = 900
READY_S = 600  # a machine may be busy; what ends on its own is noticed at once
_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^(?:\.venv/bin/|\. |make |python |pip |talkray |ray |serve |curl |git |eval )", re.MULTILINE)
_FILE = re.compile(r"# ([\w.-]+\.yaml)\b")  # a file that a command reads stands beside it


@dataclass(frozen=True, slots=True)
class Block:
    document: Path
    line: int
    language: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    return [
        Block(document, text.count("\n", 0, match.start()) + 1, *(match[1].partition(" ")[::2]), match[2])
        for match in _BLOCK.finditer(text)
    ]


BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
# How a newcomer starts a server, and what is asked of it first.
FIRST, HELLO = [block for block in BLOCKS if block.language == "sh"][:2]


def of_kind(kind: str, language: str = "sh") -> list[Block]:
    return [block for block in BLOCKS if (block.language, block.kind) == (language, kind) and block != FIRST]


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree as a clone would have it, with what `make install` would put into its .venv."""
    folder = tmp_path_factory.mktemp("docs") / "talkray"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    changed = subprocess.check_output(["git", "ls-files", "-comz", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, changed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    venv.create(folder / ".venv", symlinks=True)
    [site] = (folder / ".venv").glob("lib/python*/site-packages")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "a_own.pth").write_text(f"{folder}\n{folder / 'tools'}\n", encoding="utf-8")
    (site / "packages.pth").write_text("\n".join(packages), encoding="utf-8")
    for script in importlib.metadata.entry_points(group="console_scripts"):
        if script.name in ("talkray", "ray", "serve"):
            _write_script(folder / ".venv" / "bin", script)
    for mark in (".installed", ".installed-dev"):
        (folder / ".venv" / mark).touch()
    for block in BLOCKS:
        if block.language == "yaml" and (named := _FILE.match(block.text)):
            (folder / named[1]).write_text(block.text, encoding="utf-8")
    return folder


def _write_script(folder: Path, script: importlib.metadata.EntryPoint) -> None:
    file = folder / script.name
    call = f"import sys\nfrom {script.module} import {script.attr}\nsys.exit({script.attr}())\n"
    file.write_text(f"#!{folder}/python\n{call}", encoding="utf-8")
    file.chmod(0o755)


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a shell in which nothing was activated, exported or configured."""
    return {"HOME": str(tmp_path_factory.mktemp("home")), "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}


def start(block: Block, folder: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
    command = ["bash", "-ec", block.text] if block.language == "sh" else [".venv/bin/python", "-c", block.text]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def run(block: Block, folder: Path, environment: dict[str, str], *, within: Container[int] = (0,)) -> None:
    with start(block, folder, environment) as process:
        try:
            output = process.communicate(timeout=BOUND_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode in within, output
    assert "Traceback" not in output, output


def serve(block: Block, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Runs it while this is iterated; Ctrl-C ends it."""
    assert not is_ready(), f"something else serves on {URL}"
    with start(block, folder, environment) as process:
        served = becomes_ready(lambda: process.poll() is None)
        if served:
            yield
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        output = process.communicate(timeout=READY_S)[0]
    assert served, output


def becomes_ready(lives: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + READY_S
    while lives() and time.monotonic() < until_s and not is_ready():
        time.sleep(0.2)
    return is_ready()


def is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"{URL}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="session")
def server(clone: Path, fresh: dict[str, str]) -> Iterator[None]:
    yield from serve(FIRST, clone, fresh)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_command_says_how_it_runs(block: Block) -> None:
    if block.language == "sh":
        assert block.kind in RUN + NOT_RUN
    elif not block.language:
        assert not _COMMAND.search(block.text)


@pytest.mark.parametrize("document", sorted({block.document for block in of_kind("")}), ids=lambda path: path.name)
def test_commands_run(document: Path, clone: Path, fresh: dict[str, str]) -> None:
    for block in of_kind(""):
        if block.document == document:
            run(block, clone, fresh)


@pytest.mark.docs
@pytest.mark.parametrize("block", of_kind("slow"), ids=str)
def test_commands_that_take_minutes_run(block: Block, clone: Path, fresh: dict[str, str]) -> None:
    run(block, clone, fresh)


@pytest.mark.docs
@pytest.mark.parametrize("block", of_kind("serves"), ids=str)
def test_commands_serve_until_ctrl_c(block: Block, clone: Path, fresh: dict[str, str]) -> None:
    for earlier in of_kind(""):
        if earlier.document == block.document and earlier.line < block.line:
            run(earlier, clone, fresh)
    for _ in serve(block, clone, fresh):
        assert is_ready()


@pytest.mark.docs
@pytest.mark.parametrize("block", of_kind("deploys"), ids=str)
def test_what_commands_deploy_speaks(block: Block, clone: Path, fresh: dict[str, str]) -> None:
    assert not is_ready(), f"something else serves on {URL}"
    mark = uuid.uuid4().hex
    try:
        run(block, clone, fresh | {MARK: mark})
        assert becomes_ready(lambda: True)
        run(HELLO, clone, fresh)
    finally:
        end_marked(mark)


@pytest.mark.docs
@pytest.mark.parametrize("block", [*of_kind("served"), *of_kind("served", "python"), *of_kind("measures")], ids=str)
@pytest.mark.usefixtures("server")
def test_commands_that_ask_a_server_run(block: Block, clone: Path, fresh: dict[str, str]) -> None:
    run(block, clone, fresh, within=(0, 1) if block.kind == "measures" else (0,))
