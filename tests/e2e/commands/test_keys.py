"""A server that asks for keys, started as a person does, behind the real proxy. What it logs names nobody."""

import asyncio
import contextlib
import io
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from serve_app.api.parsing.client_input import MAX_BODY_BYTES
from serve_app.cli.key_file import create_key
from serve_app.extensions.live.connection import MAX_MESSAGE_BYTES
from tests.e2e.black_box import refusal, talkray
from tests.e2e.commands.conftest import CANARY, Guarded, bearer
from tests.e2e.speech import PATH, body
from tools.suites.processes import read_logs

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def client(guarded: Guarded) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(guarded.url, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


async def test_the_openai_client(guarded: Guarded) -> None:
    async with openai.AsyncOpenAI(base_url=f"{guarded.url}/v1", api_key=guarded.key, max_retries=0) as client:
        answer = await client.audio.speech.create(model="tts-1", input=CANARY, voice="alloy", response_format="pcm")
        assert answer.content
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.with_options(api_key="sk-wrong").models.list()
    assert refused.value.code == "invalid_api_key"


async def token_of(guarded: Guarded, client: aiohttp.ClientSession, **fields: object) -> str:
    async with client.post("/v1/tokens", json={"purpose": "socket", **fields}, headers=bearer(guarded.key)) as answer:
        return str((await answer.json())["token"])


async def test_large_bodies(guarded: Guarded, client: aiohttp.ClientSession) -> None:
    too_large = io.BytesIO(b"{" + b" " * MAX_BODY_BYTES)
    async with client.post(PATH, data=too_large, headers=bearer(guarded.key)) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (413, "payload_too_large")


async def test_large_websocket_messages(guarded: Guarded, client: aiohttp.ClientSession) -> None:
    async with client.ws_connect(f"{PATH}/ws", headers=bearer(guarded.key)) as socket:
        await socket.send_str(" " * (MAX_MESSAGE_BYTES + 1))
        assert (await socket.receive_json())["error"]["code"] == "payload_too_large"
        with contextlib.suppress(ConnectionError):  # the server does not wait for the end of the message
            await socket.send_str(" " * (MAX_BODY_BYTES + 1))
        assert (await socket.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)


async def test_say_uses_the_key(guarded: Guarded, tmp_path: Path) -> None:
    arguments = ("say", CANARY, "-o", str(tmp_path / "a.wav"), "--url", guarded.url, "--voice", "alloy")
    refused = await asyncio.to_thread(talkray, *arguments)
    assert refused.returncode == 1
    assert "HTTP 401" in refused.stderr
    spoken = await asyncio.to_thread(talkray, *arguments, environment={"TALKRAY_API_KEY": guarded.key})
    assert spoken.returncode == 0


def ways(key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """How clients send a key: of a WebSocket or a request, and its arguments."""
    for name in ("xi-api-key", "X-API-Key", "api-key"):
        yield "request", {"headers": {name: key}}
    for kind in ("request", "socket"):
        for scheme in ("Bearer", "Token", "Basic"):
            yield kind, {"headers": {"Authorization": f"{scheme} {key}"}}
        for parameter in ("api_key", "token", "access_token", "single_use_token"):
            yield kind, {"params": {parameter: key}}
    for protocols in (("token", key), ("realtime", f"openai-insecure-api-key.{key}"), (key,)):
        yield "socket", {"protocols": protocols}


def offered_keys(guarded: Guarded) -> list[str]:
    """One that is valid, one of its form that is not, and one of another service: each can be told from all others."""
    return [guarded.key, create_key(guarded.file.with_name("elsewhere.json"), "eve"), f"sk-{uuid.uuid4().hex}"]


async def test_no_key_is_in_any_log(guarded: Guarded, client: aiohttp.ClientSession) -> None:
    """Wherever it stands, and whatever becomes of the request."""
    keys, outcomes = [*offered_keys(guarded), await token_of(guarded, client)], set[int]()
    for key in keys:
        for kind, where in ways(key):
            if kind == "socket":
                try:
                    async with client.ws_connect(f"{PATH}/ws", **where) as socket:
                        await socket.send_json({"type": "speak", **body(max_new_tokens=2)})
                        assert (await socket.receive_json())["type"] == "started"
                        outcomes.add(101)
                except aiohttp.WSServerHandshakeError as refused:
                    outcomes.add(refused.status)
                continue
            for asked in (body(max_new_tokens=2), {"input": 7}):
                async with client.post(PATH, json=asked, **where) as answer:
                    await answer.read()
                    outcomes.add(answer.status)
    assert outcomes == {101, 200, 400, 401}
    contents = read_logs(guarded.pids)
    assert any(b"/v1/audio/speech" in content for content in contents.values())
    for key in keys:
        secret = key.split("-", 2)[2] if key.startswith("talkray-") else key[-32:]
        assert [str(file) for file, content in contents.items() if secret.encode() in content] == []


async def test_a_failure_is_logged_without_the_text(guarded: Guarded, client: aiohttp.ClientSession) -> None:
    """The last test: it reads what all others have left in the logs."""
    await fetch_all(client, guarded.key)
    contents = read_logs(guarded.pids)
    secret = guarded.key.split("-", 2)[2]
    assert any(b"/v1/audio/speech" in content or b"Talker" in content for content in contents.values())
    assert [str(file) for file, content in contents.items() if CANARY.encode() in content] == []
    assert [str(file) for file, content in contents.items() if secret.encode() in content] == []


async def fetch_all(client: aiohttp.ClientSession, key: str) -> None:
    for fields in ({}, {"speed": 9}, {"voice": CANARY}, {"instructions": CANARY * 140}):
        async with client.post(PATH, json=body(CANARY, max_new_tokens=5, **fields), headers=bearer(key)) as answer:
            await answer.read()


def test_a_host_that_others_can_reach_needs_keys() -> None:
    assert "talkray key create NAME" in refusal("--host", "0.0.0.0")
