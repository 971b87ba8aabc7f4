"""Which requests use a proxy of the environment: downloads and buckets of elsewhere, and nothing on this machine."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from loadtest.clients import open_session
from serve_app.cli import doctor, ray_settings, say
from serve_app.cli.serve.local_server import Address, _is_ready
from serve_app.direct import open_direct
from serve_app.nodes.notices import Aws
from serve_app.scaling import pool_watch
from talkray_tools.plan import measure
from tests.loadtest.servers import QuietHandler, running
from tests.serve_app.nodes import metadata

ROOT = Path(__file__).parents[2]
NAMES = ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY")
TITLE = b'{"info": {"title": "Talkray"}, "voices": [{"id": "nora"}]}'


@dataclass
class Listening:
    port: int
    asked: list[str]  # paths


@contextlib.contextmanager
def answering() -> Iterator[Listening]:
    asked = list[str]()

    class Answering(QuietHandler, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.answer(200, TITLE, content_type="application/json")

        do_PUT = do_POST = do_CONNECT = do_GET  # noqa: N815

    with running(Answering) as url:
        yield Listening(int(url.rpartition(":")[2]), asked)


@pytest.fixture
def own() -> Iterator[Listening]:
    with answering() as listening:
        yield listening


@pytest.fixture(params=NAMES)
def proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    for name in (*NAMES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with answering() as listening:
        monkeypatch.setenv(request.param, f"http://127.0.0.1:{listening.port}")
        yield listening


def scraped(port: int) -> object:
    node = {"NodeID": "a", "NodeManagerAddress": "127.0.0.1", "MetricsExportPort": port}
    context = SimpleNamespace(get_node_id=lambda: "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_watch.ray, "get_runtime_context", lambda: context)
        patch.setattr(pool_watch.ray, "nodes", lambda: [node])
        return pool_watch.scrape()


def waited(port: int) -> bool:
    measure._wait_ready(f"http://127.0.0.1:{port}", SimpleNamespace(poll=lambda: None))  # type: ignore[arg-type]
    return True


def first_voice(port: int) -> object:
    return say.first_voice(f"http://127.0.0.1:{port}")


async def load(port: int) -> object:
    async with open_session() as session, session.get(f"http://127.0.0.1:{port}/ready") as answer:
        return await answer.read()


def health_checks() -> dict[str, list[str]]:
    [line] = [row for row in (ROOT / "cluster/Dockerfile").read_text().splitlines() if row.startswith("    CMD [")]
    compose = yaml.safe_load((ROOT / "cluster/compose/compose.yaml").read_text())["services"]["talkray"]
    return {"Dockerfile": yaml.safe_load(line.strip().removeprefix("CMD ")), "compose": compose["healthcheck"]["test"]}


def healthy(command: list[str], port: int) -> bool:
    arguments = [each.replace("8000", str(port)) for each in command if each not in ("CMD", "python3")]
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, timeout=60, check=False).returncode == 0


OWN: dict[str, Callable[[int], object]] = {
    "a start waits for /ready": lambda port: _is_ready(Address("127.0.0.1", port)),
    "metrics of a node": scraped,
    "doctor finds a server": lambda port: doctor._runs_talkray(Address("127.0.0.1", port)),
    "doctor asks for the precision": lambda port: (
        "does not report the precision" in doctor._codec(Address("127.0.0.1", port)).text
    ),
    "plan --measure": waited,
    "metadata of a cloud": lambda port: Aws(f"http://127.0.0.1:{port}")._get("meta-data/x"),
    "say": first_voice,
    "loadtest": lambda port: asyncio.run(load(port)),
    **{
        f"health of {name}": lambda port, command=command: healthy(command, port)
        for name, command in health_checks().items()
    },
}


@pytest.mark.parametrize("ask", OWN.values(), ids=OWN)
def test_no_proxy_sees_what_stays_on_this_host(ask: Callable[[int], object], own: Listening, proxy: Listening) -> None:
    assert ask(own.port)
    assert own.asked
    assert not proxy.asked


# Other libraries make these, each in a process of its own: they read the environment once.
OUTGOING = {
    "download, first look": "hub._query_error('qwen/x')",
    "download": "HfApi().model_info('qwen/x')",
    "bucket": "VoiceStore('s3://bucket/voices').marks()",
    "traces": "otlp_exporter(sys.argv[1]).export([])",
}
SCRIPT = """
import os, sys
from deployments.weights import hub
from huggingface_hub import HfApi
from serve_app.extensions.records.tracing import otlp_exporter
from serve_app.cli import ray_settings
from serve_app.extensions.voices.voice_store import VoiceStore
os.environ.update(ray_settings._loopback_unproxied())
try:
    {call}
except Exception as error:
    print(repr(error))
"""


@pytest.mark.parametrize("target", ["elsewhere", "this machine"])
@pytest.mark.parametrize("call", OUTGOING.values(), ids=OUTGOING)
def test_what_leaves_this_machine_uses_the_proxy(call: str, target: str, own: Listening) -> None:
    with answering() as proxy:
        url = "http://outside.invalid" if target == "elsewhere" else f"http://127.0.0.1:{own.port}"
        env = {name: value for name, value in os.environ.items() if name not in (*NAMES, "no_proxy", "NO_PROXY")}
        env |= {"http_proxy": f"http://127.0.0.1:{proxy.port}", "HF_ENDPOINT": url}
        env |= {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "x"}
        env |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        command = [sys.executable, "-c", SCRIPT.format(call=call), url]
        said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=True)
        asked = {"elsewhere": bool(proxy.asked), "this machine": bool(own.asked)}
        assert asked == {"elsewhere": target == "elsewhere", "this machine": target != "elsewhere"}, said.stdout


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"no_proxy": "a"}, None),
        ({"http_proxy": "http://p"}, "localhost,127.0.0.1,::1"),
        ({"HTTPS_PROXY": "http://p", "no_proxy": "a, .b"}, "a,.b,localhost,127.0.0.1,::1"),
        ({"all_proxy": "http://p", "NO_PROXY": "a"}, "a,localhost,127.0.0.1,::1"),
        ({"http_proxy": "http://p", "no_proxy": "*"}, None),
    ],
)
def test_loopback_is_direct(environment: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", environment)
    assert ray_settings._loopback_unproxied().get("no_proxy") == expected


def test_a_server_that_never_answers_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ended = threading.Timer(10.0, silent.close)  # in place of a test that hangs
        ended.start()
        with pytest.raises(TimeoutError):
            open_direct(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout_s=0.05)
        ended.cancel()


def test_an_error_that_is_kept_holds_no_connection() -> None:
    with metadata.serving() as cloud, pytest.raises(urllib.error.HTTPError) as kept:
        open_direct(f"http://{cloud.host}/latest/meta-data", timeout_s=10.0)
    assert kept.value.code == 401
    assert kept.value.closed
