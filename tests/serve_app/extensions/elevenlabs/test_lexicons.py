import asyncio
from pathlib import Path

import httpx
import pytest

from tests.serve_app.extensions.voices.speakers import Server
from tests.serve_app.fake import FakeSynthesizer, utterance

pytestmark = pytest.mark.anyio

DICTIONARIES = "/v1/pronunciation-dictionaries"
RULE = {"string_to_replace": "SQL", "type": "alias", "alias": "sequel"}


async def test_pronunciation_dictionaries_of_elevenlabs(tmp_path: Path) -> None:
    synthesizer = FakeSynthesizer(script=utterance(1))
    async with Server(tmp_path / "store", synthesizer=synthesizer).client() as client:
        added = (await client.post(f"{DICTIONARIES}/add-from-rules", json={"name": "it", "rules": [RULE]})).json()
        own = f"{DICTIONARIES}/{added['id']}"
        more = {**RULE, "string_to_replace": "nginx", "alias": "engine x"}
        grown = (await client.post(f"{own}/add-rules", json={"rules": [more]})).json()
        assert (grown["version_rules_num"], grown["version_id"] == added["version_id"]) == (2, False)
        pls = await client.get(f"{own}/{grown['version_id']}/download")
        copied = await client.post(f"{DICTIONARIES}/add-from-file", data={"name": "b"}, files={"file": pls.content})
        listed = (await client.get(DICTIONARIES)).json()["pronunciation_dictionaries"]
        assert {each["id"] for each in listed} == {added["id"], copied.json()["id"]}
        await client.post(f"{own}/remove-rules", json={"rule_strings": ["nginx"]})
        assert (await client.get(own)).json()["rules"] == [RULE]
        phonemes = await client.post(f"{own}/add-rules", json={"rules": [{**RULE, "type": "phoneme", "phoneme": "x"}]})
        assert phonemes.json()["error"]["code"] == "phonemes_not_supported"
        for locator, spoken, is_told in (
            ({"pronunciation_dictionary_id": added["id"]}, "sequel", False),
            ({"pronunciation_dictionary_id": added["id"], "version_id": "old"}, "sequel", True),
            ({"pronunciation_dictionary_id": "21m00Tcm4TlvDq8ikWAM"}, "SQL", True),
        ):
            fields = {"text": "SQL", "pronunciation_dictionary_locators": [locator]}
            answer = await client.post("/v1/text-to-speech/ryan", json=fields)
            assert ("pronunciation_dictionary_locators" in answer.headers.get("x-ignored", "")) == is_told
            assert synthesizer.texts.pop() == spoken
        assert (await client.get(f"{DICTIONARIES}/lexicon_0")).status_code == 404


async def test_a_lexicon_that_is_not_here_may_have_a_name_in_any_script(client: httpx.AsyncClient) -> None:
    locator = {"pronunciation_dictionary_id": "词典"}
    body = {"text": "Hello", "pronunciation_dictionary_locators": [locator]}
    answer = await client.post("/v1/text-to-speech/ryan", json=body)
    assert answer.status_code == 200
    assert "Lexicon '??' is unknown" in answer.headers["x-ignored"]


async def test_rules_that_are_added_at_once_all_stay(tmp_path: Path) -> None:
    client = Server(tmp_path / "store").client()

    def rules(word: str) -> list[dict[str, str]]:
        return [{"string_to_replace": word, "type": "alias", "alias": "said"}]

    made = (await client.post(f"{DICTIONARIES}/add-from-rules", json={"name": "x", "rules": rules("one")})).json()
    adding = (
        client.post(f"{DICTIONARIES}/{made['id']}/add-rules", json={"rules": rules(word)}) for word in ("two", "3")
    )
    await asyncio.gather(*adding)
    shown = (await client.get(f"{DICTIONARIES}/{made['id']}")).json()
    assert {rule["string_to_replace"] for rule in shown["rules"]} == {"one", "two", "3"}
