import asyncio
from pathlib import Path

import pytest

from tests.serve_app.extensions.voices.speakers import Server

pytestmark = pytest.mark.anyio

DICTIONARIES = "/v1/pronunciation-dictionaries"


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
