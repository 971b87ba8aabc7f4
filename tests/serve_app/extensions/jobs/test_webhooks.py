"""Calls at the end of a job, as OpenAI's own client verifies them."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import aiohttp
import httpx
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from deployments.errors import EngineError, InvalidRequest, StartError
from serve_app.extensions.jobs import job_manager
from serve_app.extensions.jobs import webhooks as module
from serve_app.extensions.jobs.job_store import JobStore
from serve_app.extensions.jobs.settings import JobSettings
from serve_app.extensions.jobs.webhooks import Webhooks
from serve_app.extensions.voices.voice_store import VoiceStore
from tests.serve_app.extensions.jobs.desk import Server, Speaker, asked, serving, so, started, until
from tests.serve_app.one_model import refusal

pytestmark = pytest.mark.anyio

SECRET = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"


class Receiver:
    """A server of the client's: answers with each of `answers`, and then with 200."""

    def __init__(self) -> None:
        self.answers: list[web.Response] = []
        self.calls: list[tuple[bytes, dict[str, str]]] = []
        self.wait = asyncio.Event()  # before each answer
        self.wait.set()

    async def receive(self, request: web.Request) -> web.Response:
        self.calls.append((await request.read(), dict(request.headers)))
        await self.wait.wait()
        return self.answers.pop(0) if self.answers else web.Response()


@asynccontextmanager
async def receiving() -> AsyncIterator[tuple[Receiver, str]]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", receiver.receive)
    async with TestServer(app) as server:
        yield receiver, str(server.make_url("/hook"))


def allowing(tmp_path: Path, secret: str = SECRET) -> JobSettings:
    file = tmp_path / "secret"
    file.write_text(secret + "\n")
    return JobSettings(webhook_hosts=("127.0.0.1", "hooks.example.com"), webhook_secret_file=file)


async def test_the_end_of_a_job_is_told_signed(tmp_path: Path) -> None:
    async with receiving() as (receiver, url), serving(tmp_path / "s", Speaker(), allowing(tmp_path)) as (_, client):
        job = await started(client, "One.", webhook=url)
        assert job["webhook"] == {"url": url, "calls": 0, "error": None, "delivered": False}
        await so(lambda: bool(receiver.calls))
        [(content, headers)] = receiver.calls
        sdk = openai.OpenAI(api_key="any", webhook_secret=SECRET)
        sdk.webhooks.verify_signature(content, headers)
        with pytest.raises(openai.InvalidWebhookSignatureError):
            sdk.webhooks.verify_signature(content + b" ", headers)
        told = json.loads(content)
        assert (told["type"], told["data"]["id"]) == ("audio.job.completed", job["id"])
        assert (await until_told(client, job, delivered=True))["calls"] == 1
        await asyncio.sleep(0)
        assert len(receiver.calls) == 1


async def until_told(client: httpx.AsyncClient, job: Mapping[str, object], **wanted: object) -> dict[str, object]:
    """What the job says of its webhook, once it says this."""
    async with asyncio.timeout(10):
        while True:
            told: dict[str, object] = (await client.get(f"/v1/audio/jobs/{job['id']}")).json()["webhook"]
            if told.items() >= wanted.items():
                return told
            await asyncio.sleep(0.01)


async def test_failures_are_told_and_retried_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving() as (receiver, url):
        receiver.answers = [web.Response(status=302, headers={"location": url}), web.Response(status=500)]
        settings = allowing(tmp_path)
        async with serving(tmp_path / "s", Speaker(), settings) as (_, client):
            job = await started(client, "One.", webhook=url)
            told = await until_told(client, job, calls=1)
            assert (told["delivered"], told["error"]) == (False, "the server returned 302")
            kept = JobStore(VoiceStore(str(tmp_path / "s")))
            await so(lambda: kept.state(str(job["id"])).calls == 1)  # stored after it is reported
        monkeypatch.setattr(job_manager, "_CALL_AGAIN_S", 0.0)
        monkeypatch.setattr(job_manager, "_LOOK_S", 0.01)
        async with serving(tmp_path / "s", Speaker(), settings) as (_, client):
            assert (await until_told(client, job, delivered=True))["calls"] == 3
        ids = {headers["webhook-id"] for _, headers in receiver.calls}
        assert len(receiver.calls) == 3, "a redirect is not followed"
        assert len(ids) == 1, "which tells the receiver that it is the same"


async def test_a_job_that_fails_is_told_and_calls_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_manager, "_CALL_AGAIN_S", 1000.0)
    monkeypatch.setattr(job_manager, "_LOOK_S", 0.01)
    monkeypatch.setattr(job_manager, "_MOST_CALLS", 3)
    speaker = Speaker()
    speaker.errors = [EngineError("broken")] * 3
    async with receiving() as (receiver, url), serving(tmp_path / "s", speaker, allowing(tmp_path)) as (server, client):
        receiver.answers = [web.Response(status=500) for _ in range(9)]
        job = await started(client, "One.", webhook=url)
        await until(client, job, "failed")
        work, delays = server.manager._works[str(job["id"])], []
        for calls in (1, 2, 3):
            told = await until_told(client, job, calls=calls)
            assert (work.state.called_at is not None) is (calls == 3)
            delays.append(round((work.next_webhook_s - time.monotonic()) / 1000))
            work.next_webhook_s = 0.0  # the time is up
        assert delays == [1, 4, 16]
        assert told == {"url": url, "calls": 3, "error": "the server returned 500", "delivered": False}
        assert json.loads(receiver.calls[0][0])["type"] == "audio.job.failed"


async def test_a_call_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"id": "job_1", "status": "completed", "ended_at": 1}
    webhooks = Webhooks(allowing(tmp_path))
    async with receiving() as (receiver, url):
        receiver.answers = [web.Response(status=204), web.Response(status=299), web.Response(status=300)]
        assert [await webhooks.notify(url, "ada", job) for _ in range(3)] == [None, None, "the server returned 300"]
        assert "webhook_hosts" in str(
            await Webhooks(JobSettings()).notify(url, "ada", job)
        )  # settings of a later start
        assert len(receiver.calls) == 3
        monkeypatch.setattr(module, "_TIMEOUT", aiohttp.ClientTimeout(total=0.05))
        monkeypatch.setattr(receiver, "wait", asyncio.Event())
        assert await webhooks.notify(url, "ada", job) == "the server did not respond within 0.05 s"
        receiver.wait.set()
    monkeypatch.undo()
    assert str(await webhooks.notify(url, "ada", job)).startswith("the server cannot be reached: ")


LONGEST = "https://hooks.example.com/".ljust(2000, "x")
URLS: list[object] = [
    *("https://other.example.com/", "https://hooks.example.com.evil.com/", "http://hooks.example.com/"),
    *("https://user:pass@hooks.example.com/", "https://hooks.example.com:port/", "file:///etc/passwd", "//[", 7),
    *("https://hooks.example.com/#part", LONGEST + "x"),
]


async def test_only_hosts_of_the_settings_are_called(tmp_path: Path) -> None:
    server = Server(tmp_path / "s", Speaker(), allowing(tmp_path))
    async with server.client() as client:
        for url in URLS:
            assert refusal(await asked(client, "One.", webhook=url)) == (400, "webhook"), url
        assert (await asked(client, "One.", webhook=LONGEST)).status_code == 201


def test_no_host_is_called_without_settings_and_a_secret(tmp_path: Path) -> None:
    for url in ("https://169.254.169.254/x", "https://hooks.example.com/", "http://127.0.0.1/"):
        with pytest.raises(InvalidRequest, match="webhook_hosts"):
            Webhooks(JobSettings()).checked(url)
    with pytest.raises(ValueError, match="webhook_secret_file"):
        JobSettings(webhook_hosts=("hooks.example.com",))
    for size in (23, 24, 64, 65):
        with pytest.raises(StartError, match="24 to 64 bytes") if size in (23, 65) else nullcontext():
            Webhooks(allowing(tmp_path, base64.b64encode(bytes(size)).decode()))
    with pytest.raises(StartError, match="cannot be read"):
        Webhooks(allowing(tmp_path, "no base64!"))


async def test_each_end_is_told_once_and_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two segments fail at the same time, and calls about that end fail: the next end does not wait for them."""
    monkeypatch.setattr(job_manager, "_LOOK_S", 0.01)
    monkeypatch.setattr(job_manager, "_CALL_AGAIN_S", 1000.0)
    monkeypatch.setattr(job_manager, "_MOST_FAILURES", 1)
    speaker = Speaker()
    speaker.errors = [EngineError("broken")] * 2
    async with receiving() as (receiver, url), serving(tmp_path / "s", speaker, allowing(tmp_path)) as (_, client):
        receiver.answers = [web.Response(status=500)]
        job = await started(client, "One.", "Two.", webhook=url)
        await until_told(client, job, calls=1)
        await client.post(f"/v1/audio/jobs/{job['id']}/resume")
        await until_told(client, job, delivered=True)
        bodies = [json.loads(content) for content, _ in receiver.calls]
    assert [body["type"] for body in bodies] == ["audio.job.failed", "audio.job.completed"]
    assert all((body["owner"], body["data"]["webhook"]["url"]) == ("", url) for body in bodies), "both are signed"
