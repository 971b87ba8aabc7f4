"""The files of a release: complete, equal in every build, and for every Python."""

import hashlib
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest

from tools import dist

MACHINE = os.uname().machine
ONE_CPU = "-march=x86-64-v3 -DTALKRAY_ONE_CPU" if MACHINE == "x86_64" else "-DTALKRAY_ONE_CPU"  # compiled sooner
PROJECT = tomllib.loads((dist.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAME = f"talkray-{PROJECT['version']}"


def built(folder: Path, *, umask: int, environment: Mapping[str, str]) -> dict[str, bytes]:
    command = [sys.executable, "-m", "tools.dist", str(folder), "--machine", MACHINE]
    environment = os.environ | {"CFLAGS": ONE_CPU, "SOURCE_DATE_EPOCH": "1700000000", **environment}
    subprocess.run(command, cwd=dist.ROOT, env=environment, umask=umask, check=True, stdout=subprocess.DEVNULL)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_two_builds_are_equal_and_complete(tmp_path: Path) -> None:
    first = built(tmp_path / "a", umask=0o022, environment={"TZ": "UTC", "PYTHONHASHSEED": "1", "TMPDIR": "/tmp"})
    (tmp_path / "scratch").mkdir()
    environment = {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "2", "TMPDIR": str(tmp_path / "scratch")}
    second = built(tmp_path / "b", umask=0o077, environment=environment)
    assert [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)] == []
    [wheel] = (tmp_path / "a").glob("*.whl")
    page = (dist.ROOT / "docs/versions.md").read_text(encoding="utf-8")
    assert wheel.name.replace(PROJECT["version"], "VERSION") in page
    assert {*first} == {f"{NAME}.tar.gz", f"{NAME}-constraints.txt", wheel.name, "SHA256SUMS"}
    sums = dict(reversed(line.split("  ")) for line in first["SHA256SUMS"].decode().splitlines())
    assert sums == {name: hashlib.sha256(first[name]).hexdigest() for name in first if name != "SHA256SUMS"}
    with ZipFile(wheel) as archive, tarfile.open(tmp_path / "a" / f"{NAME}.tar.gz") as sdist:
        packed, source = set(archive.namelist()), {name.removeprefix(f"{NAME}/") for name in sdist.getnames()}
        tags = archive.read(f"{NAME}.dist-info/WHEEL").decode()
        programs = {each.filename for each in archive.infolist() if (each.external_attr >> 16) & 0o111}
    assert {name.partition("/")[0] for name in packed} == {
        "serve_app", "deployments", "loadtest", "talkray_tools", f"{NAME}.dist-info"
    }  # fmt: skip
    assert ("Root-Is-Purelib: false" in tags, "Tag: cp" in tags) == (True, False)
    tracked = subprocess.check_output(
        ["git", "ls-files", "serve_app", "deployments", "loadtest", "tools/talkray_tools"], cwd=dist.ROOT, text=True
    ).split()
    code = {name for name in tracked if not name.endswith((".c", ".h", ".gitignore", ".gitattributes"))}
    assert sorted({name.removeprefix("tools/") for name in code} - packed) == []
    assert sorted({*tracked} - source) == []
    assert {"serve_app/proxy/guarded-haproxy"} <= programs


def test_a_release_names_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ["urls" in each for each in dist.remarks(PROJECT)] == [True] * (not PROJECT.get("urls"))
    assert dist.remarks({"urls": {"Source": "x"}}) == []
    (tmp_path / "of-another-version.whl").touch()
    with pytest.raises(dist.BuildError, match="is not empty: remove it"):
        dist.build(tmp_path, [MACHINE])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(dist.BuildError, match="make cross-compilers"):
        dist._build_wheel(tmp_path, "aarch64", 0)
