"""Access tokens: who may issue them, where they are accepted, and what ends them."""

import asyncio
import json
import logging
import re
from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from deployments.errors import StartError
from serve_app.cli.key_file import create_key
from serve_app.config import AccessSettings, ApiSettings
from serve_app.extension import Node
from serve_app.extensions.access_tokens import tokens as module
from serve_app.extensions.access_tokens.extension import TokenSettings
from serve_app.extensions.access_tokens.signing import Secrets
from serve_app.extensions.access_tokens.tokens import PURPOSES, AccessTokens
from serve_app.extensions.voices.extension import open_voices
from serve_app.extensions.voices.library import Voices
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.extensions.voices.voice_store import VoiceStore
from tests.serve_app import asgi
from tests.serve_app.extensions.client import Client
from tests.serve_app.fake import FakeSynthesizer, utterance
from tests.serve_app.one_model import client_of, one_api
from tools.suites.rows import DIALECTS, ISSUING, is_here

pytestmark = pytest.mark.anyio

SPEECH = "/v1/audio/speech"
BODY = {"model": "tts-1", "input": "Hello", "voice": "alloy", "response_format": "pcm"}
NOW = 1_800_000_000.0


class Server:
    """Ingress replicas over one key file and one store, whose clock is set."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder, self.keys_file = NOW, folder, folder / "keys.json"
        self.key = create_key(self.keys_file, "ada")
        self.secrets_file = folder / "token-secrets"
        self.records: list[str | None] = []

    def replica(self, voices: Voices | None = None) -> FastAPI:
        voices = voices or Voices(VoiceStore(str(self.folder / "store")), VoiceSettings())
        opened = AccessTokens(Secrets(self.secrets_file, is_ours=True), voices, lambda: self.now)
        settings = ApiSettings(access=AccessSettings(keys_file=self.keys_file))
        states = {"access_tokens": opened, "voices": voices}
        return one_api(
            FakeSynthesizer(script=utterance()),
            settings,
            opened=states,
            on_end=lambda each: self.records.append(each.key),
        )

    async def issue(self, path: str, api: FastAPI | None = None, **fields: object) -> str:
        row = ISSUING[path]
        async with client_of(api or self.replica()) as client:
            answer = await client.post(
                path, json={**row.fields, **fields}, headers={"authorization": f"Bearer {self.key}"}
            )
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store"), answer.text
        return str(answer.json()[row.token])


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


async def told(api: FastAPI, place: str, token: str) -> tuple[int, str]:
    """The status of a request with the token, and the reason; the status of an open socket is 101."""
    method, path = place.split()
    headers = {"authorization": f"Bearer {token}"}
    if method != "WS":
        async with client_of(api) as client:
            answer = await client.request(method, path, json=BODY if method == "POST" else None, headers=headers)
        return answer.status_code, answer.text if answer.status_code >= 400 else ""
    async with asgi.websocket(api, path, headers=headers) as connection:
        start = await connection.next()
        if start["type"] == "websocket.accept":
            return 101, ""
        error = json.loads((await connection.next())["body"])["error"]
        assert error["code"] == "invalid_api_key"
        return start["status"], error["message"]


def places(*purposes: str, method: str = "") -> list[str]:
    """The places of these purposes that are served."""
    words = {"{voice_id}": "ryan", "{deployment}": "any", "{path:path}": "v1/audio/speech/ws"}
    found = {re.sub(r"{.*?}", lambda name: words[name[0]], each) for name in purposes for each in PURPOSES[name].places}
    return sorted(each for each in found if each.startswith(method) and is_here(each.split()[1]))


async def test_a_token_of_a_later_version_opens_nothing(server: Server) -> None:
    voices = Voices(VoiceStore(str(server.folder / "store")), VoiceSettings())
    later = AccessTokens(Secrets(server.secrets_file, is_ours=True), voices, lambda: NOW)
    token = later.issue("id", "later", lifetime_s=60, is_single_use=False, session={}).value
    for place in (f"POST {SPEECH}", "GET /v1/models", "WS /v1/realtime"):
        status, reason = await told(server.replica(), place, token)
        assert status in (401, 403)
        assert f"is for later, not for {place}" in reason


@pytest.mark.parametrize("path", ISSUING)
async def test_a_token_opens_what_it_is_for_and_nothing_else(server: Server, path: str) -> None:
    api, other = server.replica(), server.replica()
    others = [f"POST {each}" for each in ISSUING] + ["GET /v1/models", "POST /v1/audio/voices", "POST /v1/audio/jobs"]
    for place in (*places(*PURPOSES), *others):
        method, own_path = place.split()
        fits = PURPOSES[ISSUING[path].purpose].fits(method, own_path)
        status, reason = await told(other, place, await server.issue(path, api))
        assert (status != 401) == fits, (place, status)
        assert fits or f"not for {place}" in reason


async def test_tokens_for_speech_speak_with_the_limits_and_the_name_of_their_key(server: Server) -> None:
    server.key = create_key(server.keys_file, "eve", requests_per_minute=3)
    api = server.replica()
    token = await server.issue("/v1/tokens", api, purpose="speech")
    assert [(await told(api, f"POST {SPEECH}", token))[0] for _ in range(3)] == [200, 200, 429]
    assert set(server.records) == {"eve"}


@pytest.mark.parametrize("path", ISSUING)
async def test_every_way_to_send_a_token(server: Server, path: str) -> None:
    api = server.replica()
    for place in places(ISSUING[path].purpose, method="WS"):
        for name in (name for dialect in DIALECTS for name in dialect.key_parameters):
            query = f"{place.split()[1]}?{name}={await server.issue(path, api)}"
            async with asgi.websocket(api, query) as connection:
                await Client(connection).accepted()
        token = await server.issue(path, api)
        for header in (name for dialect in DIALECTS for name in dialect.key_headers):
            async with asgi.websocket(api, place.split()[1], headers={header: token}) as connection:
                await Client(connection).accepted()
            token = await server.issue(path, api)
        for first, second in (("realtime", "openai-insecure-api-key.{}"), ("bearer", "{}"), ("token", "{}")):
            offered = (first, second.format(await server.issue(path, api)), "another")
            async with asgi.websocket(api, place.split()[1], subprotocols=offered) as connection:
                assert (await connection.next())["subprotocol"] == first


async def test_a_single_use_token_opens_one_socket_at_any_replica(server: Server) -> None:
    place = "WS /v1/text-to-speech/ryan/stream-input"
    replicas = [server.replica() for _ in range(3)]
    for path, fields in (("/v1/single-use-token/tts_websocket", {}), ("/v1/tokens", {"single_use": True})):
        token = await server.issue(path, **fields)
        answers = await asyncio.gather(*(told(api, place, token) for api in replicas))
        assert sorted(status for status, _ in answers) == [101, 401, 401]
        assert all("was already used" in reason for status, reason in answers if status == 401)


async def test_a_refused_request_uses_no_token_up(server: Server) -> None:
    server.key = create_key(server.keys_file, "eve", max_streams=1)
    api, place = server.replica(), "/v1/audio/speech/ws"
    first, second = [await server.issue("/v1/tokens", single_use=True) for _ in range(2)]
    async with asgi.websocket(api, place, headers={"authorization": f"Bearer {first}"}) as connection:
        await Client(connection).accepted()
        async with asgi.websocket(api, place, headers={"authorization": f"Bearer {second}"}) as refused:
            await Client(refused).accepted()  # to be closed with 1013
            assert (await refused.next())["code"] == 1013
    assert await told(api, f"WS {place}", second) == (101, "")


async def test_a_token_with_one_other_character_is_none(server: Server) -> None:
    """Also where the other character means the same bits of the signature."""
    api = server.replica()
    token = await server.issue("/v1/tokens", api, purpose="speech")
    assert await told(api, f"POST {SPEECH}", token) == (200, "")
    others = "A-z.="
    for at in (*range(8), *range(8, len(token), 9), *range(len(token) - 3, len(token))):
        changed = [token[:at] + token[at + 1 :], *(token[:at] + other + token[at:] for other in others)]
        changed += [token[:at] + other + token[at + 1 :] for other in others if other != token[at]]
        if at == len(token) - 1:
            digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
            changed += [token[:at] + other for other in digits if other != token[at]]
        for each in changed:
            status, reason = await told(api, f"POST {SPEECH}", each)
            assert (status, bool(re.search("is (not valid|invalid)", reason))) == (401, True), each
    assert (await told(api, f"POST {SPEECH}", token + "="))[0] == 401


@pytest.mark.parametrize("path", ISSUING)
async def test_servers_that_issue_none(tmp_path: Path, server: Server, path: str) -> None:
    async def refused(api: FastAPI) -> tuple[int, str]:
        async with client_of(api) as client:
            sent = {**ISSUING[path].fields, **({"single_use": True} if path == "/v1/tokens" else {})}
            answer = await client.post(path, json=sent, headers={"authorization": f"Bearer {server.key}"})
        return answer.status_code, answer.json()["error"]["message"]

    status, message = await refused(one_api(FakeSynthesizer(), ApiSettings()))
    assert (status, "does not require API keys" in message) == (403, True)
    if path in ("/v1/single-use-token/tts_websocket", "/v1/tokens"):
        status, message = await refused(server.replica(open_voices(VoiceSettings(), num_nodes=2)))
        assert (status, "api.voices.store" in message) == (503, True)
    node = Node(is_running=lambda name: True, is_ready=lambda: True, scrape=bytes, num_nodes=2)
    settings = ApiSettings(access=AccessSettings(keys_file=server.keys_file), voices=VoiceSettings(store="s3://voices"))
    status, message = await refused(one_api(FakeSynthesizer(), settings, node=node))
    assert (status, "api.access_tokens.secrets_file" in message) == (503, True)
    assert not server.secrets_file.exists()


@pytest.mark.parametrize("content", ["", "# nothing\n", "short\n", None])
def test_a_file_of_the_settings_that_cannot_be_used_ends_the_start(server: Server, content: str | None) -> None:
    if content is not None:
        server.secrets_file.write_text(content)
    settings = ApiSettings(
        access=AccessSettings(keys_file=server.keys_file), access_tokens=TokenSettings(secrets_file=server.secrets_file)
    )
    with pytest.raises(StartError, match="secrets_file"):
        one_api(FakeSynthesizer(), settings)


async def test_marks_of_old_tokens_are_removed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    voices = Voices(VoiceStore(str(server.folder / "store")), VoiceSettings())
    store, opened = voices.files(), AccessTokens(Secrets(server.secrets_file, is_ours=True), voices, lambda: NOW)
    assert store.create("tokens/old")
    for age_s, left in ((7000.0, ["tokens/old"]), (7300.0, [])):
        present_s = (store.meta("tokens/old") or {})["last_modified"].timestamp()
        monkeypatch.setattr(store, "now_s", lambda then_s=present_s + age_s: then_s)
        monkeypatch.setattr(module, "_SWEEP_S", -1.0)
        opened.follow()
        assert opened._sweeping is not None
        await opened._sweeping
        assert [meta["path"] for meta in store.listed("tokens/")] == left


async def test_no_log_has_a_token(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    api, token = server.replica(), await server.issue("/v1/tokens")
    for query in (token, token[:-2]):
        async with asgi.websocket(api, f"/v1/audio/speech/ws?token={query}") as connection:
            await connection.next()
    assert token[:-2] not in caplog.text
    assert server.secrets_file.read_text().strip() not in caplog.text


async def test_openai_creates_a_client_secret(server: Server) -> None:
    api = server.replica()
    http_client = httpx2.AsyncClient(transport=httpx2.ASGITransport(api))
    async with AsyncOpenAI(api_key=server.key, base_url="http://talkray/v1", http_client=http_client) as client:
        plain = await client.realtime.client_secrets.create()
        session = {"type": "realtime", "audio": {"output": {"voice": "serena", "speed": 1.5}}}
        made = await client.realtime.client_secrets.create(
            expires_after={"anchor": "created_at", "seconds": 120},
            session=session,  # type: ignore[arg-type]
        )
    assert (plain.expires_at, made.expires_at) == (NOW + 600, NOW + 120)
    assert made.value.startswith("ek_")
    assert (made.session.type, made.session.object) == ("realtime", "realtime.session")
    headers = {"authorization": f"Bearer {made.value}"}
    async with asgi.websocket(api, "/v1/realtime?model=gpt-realtime", headers=headers) as connection:
        client_side = await Client(connection).accepted()
        *_, updated = (await client_side.until(type="session.updated"))[0]
    output = updated["session"]["audio"]["output"]
    assert (output["voice"], output["speed"]) == ("serena", 1.5)
