import httpx
import pytest

from serve_app.api.catalogue import ALIASES, resolve
from serve_app.config import ApiSettings
from tests.serve_app.fake import CUSTOM_VOICE

pytestmark = pytest.mark.anyio


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    names = [model["id"] for model in listed["data"]]
    assert listed["object"] == "list"
    assert names == [CUSTOM_VOICE.name, *ApiSettings().model_aliases]
    for name in names:
        shown = (await client.get(f"/v1/models/{name}")).json()
        assert (shown["id"], shown["object"], shown["root"]) == (name, "model", CUSTOM_VOICE.name)
    assert (await client.get("/v1/models/other")).status_code == 404
    assert [model["id"] for model in (await client.get("/v1/audio/models")).json()["models"]] == names


async def test_voices(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/audio/voices")).json()
    assert listed["voices"] == listed["data"]
    assert {voice["id"] for voice in listed["voices"]} == {*CUSTOM_VOICE.voices, *ALIASES}
    fields = {"id", "name", "language", "gender", "description", "type", "alias_of"}
    assert all(set(voice) == fields for voice in listed["voices"])
    meant = {voice["id"]: voice["alias_of"] for voice in listed["voices"]}
    assert [name for name, voice in meant.items() if voice is None] == list(CUSTOM_VOICE.voices)
    assert all(meant[name] == resolve(name, CUSTOM_VOICE.voices) for name in ALIASES)
    assert listed["languages"] == ["auto", *CUSTOM_VOICE.languages]
    assert listed["uploaded_voices"] == []
    assert all(voice["name"] == voice["id"] for voice in listed["voices"])
    legacy = (await client.get("/v1/audio/voices?legacy=true")).json()
    assert legacy["voices"] == [voice["name"] for voice in listed["voices"]]
    assert (await client.get("/v1/audio/voices?legacy=false")).json() == listed
    assert (await client.get("/v1/audio/voices?legacy=maybe")).json()["error"]["param"] == "legacy"
