from pathlib import Path

import pytest

from tests.serve_app.extensions.voices.speakers import Server
from tests.serve_app.fake import FakeSynthesizer

pytestmark = pytest.mark.anyio


async def test_pronunciation_dictionaries_of_cartesia(tmp_path: Path, synthesizer: FakeSynthesizer) -> None:
    dictionaries = "/pronunciation-dicts/"
    items = [{"text": "SQL", "alias": "sequel"}, {"text": "Polish", "alias": "pole ish", "case_sensitive": True}]
    async with Server(tmp_path / "store", synthesizer=synthesizer).client() as client:
        made = (await client.post(dictionaries, json={"name": "it", "items": items})).json()
        assert (made["name"], made["items"][0]) == ("it", {"text": "sql", "alias": "sequel", "case_sensitive": False})
        own = dictionaries + made["id"]
        fields = {"transcript": "Sql, Polish polish", "voice": "ryan", "pronunciation_dict_id": made["id"]}
        for path in ("/tts/bytes", "/tts/sse"):
            answer = await client.post(path, json=fields)
            assert "pronunciation_dict_id" not in answer.headers.get("x-ignored", "")
            assert synthesizer.texts.pop() == "sequel, pole ish polish"
        changed = (await client.patch(own, json={"items": [{"text": "SQL", "alias": "S Q L"}]})).json()
        assert (changed["name"], (await client.get(own)).json()) == ("it", changed)
        await client.patch(own, json={"name": "other"})
        (listed,) = (await client.get(dictionaries)).json()["data"]
        assert (listed["name"], listed["items"]) == ("other", changed["items"])
        after = await client.get(dictionaries, params={"starting_after": made["id"]})
        assert after.json() == {"data": [], "has_more": False}
        for bad, code in (([{"text": "a"}], "invalid_value"), ([{"text": "a", "alias": "<<h|i>>"}], "phonemes")):
            refused = (await client.patch(own, json={"items": bad})).json()["error"]
            assert (refused["param"], code in f"{refused['code']}") == ("items", True)
        assert (await client.delete(own)).status_code == 204
        assert (await client.get(own)).status_code == 404
        gone = await client.post("/tts/bytes", json=fields)
        assert f"pronunciation_dict_id (Lexicon '{made['id']}' is unknown" in gone.headers["x-ignored"]
        assert synthesizer.texts.pop() == "Sql, Polish polish"
