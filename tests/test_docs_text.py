"""Every example of docs/text.md is true."""

import json
import re
from pathlib import Path

import pytest
from httpx import ASGITransport, AsyncClient

from serve_app.config import ApiSettings
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer
from tests.serve_app.one_model import one_api

pytestmark = pytest.mark.anyio
TEXT = (Path(__file__).parents[1] / "docs" / "text.md").read_text(encoding="utf-8")


def rows(*heads: str) -> list[tuple[str, ...]]:
    """All rows of the tables with these columns; code without its marks."""
    found, inside = [], False
    for line in TEXT.splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split(" | "))
        if tuple(cell.strip() for cell in line.strip("|").split("|")) == tuple(f"{head}" for head in heads):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not set(line) <= set("|-"):
            found.append(tuple(re.sub(r"^`(.*)`$", r"\1", cell) for cell in cells))
    assert found
    return found


async def shown(**fields: object) -> tuple[int, dict[str, object]]:
    api = one_api(FakeSynthesizer(CUSTOM_VOICE), ApiSettings())
    async with AsyncClient(transport=ASGITransport(api), base_url="http://127.0.0.1") as client:
        answer = await client.post("/v1/audio/text", json={"voice": "alloy", **fields})
        return answer.status_code, answer.json()


async def test_the_dry_run() -> None:
    example, answer = re.findall(r"```json (?:example|answer)\n(.*?)```", TEXT, re.S)
    status, told = await shown(**json.loads(example))
    assert status == 200
    assert {name: told[name] for name in json.loads(answer)} == json.loads(answer)


@pytest.mark.parametrize(("sent", "spoken"), rows("sent", "spoken"))
async def test_what_is_spoken_of_marks(sent: str, spoken: str) -> None:
    status, told = await shown(input=sent.replace("<br>", "\n"))
    assert (status, told["spoken"]) == (200, spoken)
    assert (await shown(input=sent, markup="none"))[1]["spoken"] == sent


@pytest.mark.parametrize(("lexicon", "sent", "spoken"), rows("lexicon", "sent", "spoken"))
async def test_what_a_lexicon_respells(lexicon: str, sent: str, spoken: str) -> None:
    status, told = await shown(input=sent, lexicon=json.loads(lexicon))
    assert (status, told["spoken"]) == (200, spoken)


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"markup": "ssml", "input": sent}, error) for sent, error in rows("sent", "error")]
    + [({"input": "Hi.", "lexicon": json.loads(lexicon)}, error) for lexicon, error in rows("lexicon", "error")],
)
async def test_what_is_refused(fields: dict[str, object], error: str) -> None:
    status, told = await shown(**fields)
    assert (status, told["error"]["message"]) == (400, error)  # type: ignore[index]


@pytest.mark.parametrize("element", re.findall(r"`(<[^`]*>)`", TEXT.split("| element | effect |")[1].split("\n\n")[0]))
async def test_each_element_is_read(element: str) -> None:
    name = re.findall(r"\w[\w-]*", element)[0]
    whole = element if element.endswith("/>") or "</" in element else f"{element}A1</{name}>"
    status, told = await shown(input=f"One {whole} two", markup="ssml")
    assert status == 200
    assert not told["left_out"]
    assert told["spoken"] != f"One {whole} two"
