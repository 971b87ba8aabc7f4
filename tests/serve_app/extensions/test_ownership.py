"""What a key has stored is its own: no other key sees it, changes it or speaks with it. An admin may."""

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from serve_app.cli.key_file import create_key
from serve_app.config import AccessSettings
from tests.serve_app import asgi
from tests.serve_app.extensions.client import Client, Json, every_api
from tests.serve_app.extensions.test_contract import post_rows, socket_rows
from tests.serve_app.extensions.voices.speakers import Server, store, wav
from tests.serve_app.fake import BASE, FakeSynthesizer
from tests.serve_app.one_model import client_of
from tools.suites.row import PostRow, SocketRow
from tools.suites.rows import DIALECTS, OWNED, POSTS

pytestmark = pytest.mark.anyio

UNKNOWN = re.compile("is stored|is unknown")
# Other path parameters: these name no stored object, or a preview, which needs a VoiceDesign model.
OTHERS = {"deployment", "model_id:path", "name", "generated_voice_id", "token_type"}
OPERATIONS = [route.operation for dialect in DIALECTS for route in dialect.routes]
NAMING = [each for each in OPERATIONS if "{" in each and each.replace("{voice_id}", "$voice").split()[1] not in POSTS]
LENIENT = ("GET /v1/voices/{voice_id}", "GET /voices/{voice_id}")  # of which an unknown voice is a 400
LISTS = [each.removeprefix("GET ") for each in OPERATIONS if each.startswith("GET ") and "{" not in each]


@pytest.fixture
def clients(tmp_path: Path) -> Mapping[str, httpx.AsyncClient]:
    """Of two keys, of an admin's, and of none."""
    keys = {name: create_key(tmp_path / "keys.json", name, admin=name == "root") for name in ("ada", "eve", "root")}
    headers = {"": {}} | {name: {"authorization": f"Bearer {key}"} for name, key in keys.items()}
    access = AccessSettings(keys_file=tmp_path / "keys.json")
    api = every_api(tmp_path / "store", FakeSynthesizer(BASE), access)
    return {name: client_of(api, own) for name, own in headers.items()}


async def made(client: httpx.AsyncClient, kind: str) -> Json:
    owned = OWNED[kind]
    files = {name: ("a.wav", wav()) for name in owned.files}
    body = {"data": owned.fields, "files": files} if files else {"json": owned.fields}
    answer = await client.post(owned.path, **body)  # type: ignore[arg-type]
    assert answer.is_success, answer.text
    told: Json = answer.json()
    return told


@pytest.mark.parametrize("operation", [each for each in NAMING if not OTHERS & {*re.findall(r"{(.*?)}", each)}])
async def test_others_can_neither_see_nor_change_it(clients: Mapping[str, httpx.AsyncClient], operation: str) -> None:
    method, template = operation.split()
    kind = re.findall(r"{(.*?)}", template)[0]
    if kind == "job_id":
        await made(clients["ada"], "voice_id")
    told = await made(clients["ada"], kind)
    rule = {"string_to_replace": "SQL", "type": "alias", "alias": "said"}
    sent = {"json": {"name": "hers", "rules": [rule], "rule_strings": ["SQL"]}}

    async def ask(who: str, name: object) -> httpx.Response:
        words = {kind: name, "part": 0, "version_id": told.get("version_id")}
        path = template.format_map(words)
        return await clients[who].request(method, path, **(sent if method in ("POST", "PATCH") else {}))

    for name in (told["id"], told.get("name", told["id"])):
        refused = await ask("eve", name)
        assert refused.status_code == (400 if operation in LENIENT else 404), refused.text
        assert str(told["id"]) not in refused.text or name == told["id"]
        assert (await ask("", name)).status_code == 401
    assert (await ask("root", told["id"])).status_code not in (401, 404), "it is still there"


async def test_lists_have_only_what_is_ones_own(clients: Mapping[str, httpx.AsyncClient]) -> None:
    ids = {kind: str((await made(clients["ada"], kind))["id"]) for kind in sorted(OWNED, reverse=True)}
    hers = str((await made(clients["eve"], "voice_id"))["id"])  # of the same name: names are of one owner
    found = dict.fromkeys(ids, 0)
    for path in LISTS:
        mine, others, every, nothing = [(await clients[name].get(path)).text for name in ("ada", "eve", "root", "")]
        assert not [kind for kind in ids if ids[kind] in others], path
        assert (ids["voice_id"] in mine) == (hers in others), path
        for kind in ids:
            assert (ids[kind] in mine) == (ids[kind] in every), path
            found[kind] += ids[kind] in mine
        assert not [each for each in ids.values() if each in nothing], path
    assert all(found.values()), found


@post_rows
async def test_only_its_owner_speaks_with_it(tmp_path: Path, row: PostRow) -> None:
    server = Server(tmp_path / "store", "ada", "eve", admins=("root",))
    async with server.client("ada") as client:
        told = await store(client, "mine")
    for name in ("ada", "eve", "root"):
        server.synthesizer.requests.clear()
        async with server.client(name) as client:
            for voice in ("mine", str(told["id"])):
                path = row.sample.filled(voice=voice).path
                answer = await client.post(path, json=row.body("Hi.", voice=voice))
                assert answer.status_code == (200 if name != "eve" or row.has_results else 400) or (
                    UNKNOWN.search(answer.text) and name == "eve"
                ), answer.text
        assert bool(server.synthesizer.requests) == (name != "eve")


@socket_rows
async def test_only_its_owner_speaks_with_it_over_sockets(tmp_path: Path, row: SocketRow) -> None:
    server = Server(tmp_path / "store", "ada", "eve")
    async with server.client("ada") as client:
        voice = str((await store(client, "mine"))["id"])
    sample = row.sample.filled(text="Hi.", voice=voice)
    for name in ("eve", "ada"):
        headers = {"authorization": f"Bearer {server.keys[name]}"}
        socket = asgi.websocket(server.api, sample.path, headers=headers, subprotocols=row.sample.protocols)
        heard: list[object] = []
        async with socket as connection, asyncio.timeout(10):
            listener = await Client(connection).accepted()
            listener.send(*map(dict, sample.messages))
            while not (server.synthesizer.requests or any(UNKNOWN.search(str(each)) for each in heard)):
                heard.append(await listener.next())
        assert bool(server.synthesizer.requests) == (name == "ada"), heard
    await server.texts.aclose()
    assert server.synthesizer.requests[0].reference is not None
