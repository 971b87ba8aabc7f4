"""Every example of docs/text.md, docs/english.md and docs/style-tags.md is true."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from httpx import ASGITransport, AsyncClient

from deployments.embedded_voice.english import spoken_english
from serve_app.cli.say import SayRequest, show_text
from serve_app.config import ApiSettings
from serve_app.extensions.text.reading import TextSettings
from tests.serve_app.extensions.test_interruptions import serving
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer
from tests.serve_app.one_model import one_api

pytestmark = pytest.mark.anyio
DOCS = Path(__file__).parents[1] / "docs"
TEXT, ENGLISH, TAGS = ((DOCS / f"{page}.md").read_text("utf-8") for page in ("text", "english", "style-tags"))


def rows(*heads: str, page: str = TEXT) -> list[tuple[str, ...]]:
    """All rows of the tables with these columns; code without its marks."""
    found, inside = [], False
    for line in page.splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split(" | "))
        if tuple(cell.strip() for cell in line.strip("|").split("|")) == tuple(f"{head}" for head in heads):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not set(line) <= set("|-"):
            found.append(tuple(re.sub(r"^`(.*)`$", r"\1", cell) for cell in cells))
    assert found
    return found


async def shown(settings: ApiSettings | None = None, **fields: object) -> tuple[int, dict[str, object]]:
    api = one_api(FakeSynthesizer(CUSTOM_VOICE), settings or ApiSettings())
    async with AsyncClient(transport=ASGITransport(api), base_url="http://127.0.0.1") as client:
        answer = await client.post("/v1/audio/text", json={"voice": "alloy", **fields})
        return answer.status_code, answer.json()


@pytest.mark.parametrize("page", [TEXT, TAGS])
async def test_the_dry_run(page: str) -> None:
    example, answer = re.findall(r"```json (?:example|answer)\n(.*?)```", page, re.S)
    status, told = await shown(**json.loads(example))
    assert status == 200
    assert {name: told[name] for name in json.loads(answer)} == json.loads(answer)


@pytest.mark.parametrize(("text", "unspoken"), [
    ("A plain text, 2 * 3.", []), ("*a* **b**", ["*", "*", "**", "**"]),
    ("😀 𝒳 `c` 😀", ["😀", "`", "`", "😀"]),  # positions are in code points
    ("<b>a</b><!-- b -->", ["<b>", "</b><!-- b -->"]),
])  # fmt: skip
async def test_what_is_not_spoken_has_its_place(text: str, unspoken: list[str]) -> None:
    _, told = await shown(input=text)
    assert [text[start:end] for start, end in told["unspoken"]] == unspoken  # type: ignore[attr-defined]


async def test_letters_that_the_voice_cannot_speak_are_unspoken() -> None:
    info = replace(CUSTOM_VOICE, spoken_form="english", languages=("english",))
    async with AsyncClient(
        transport=ASGITransport(one_api(FakeSynthesizer(info), ApiSettings())), base_url="http://a"
    ) as client:
        told = (await client.post("/v1/audio/text", json={"voice": "alloy", "input": "The café at Δx, 你好."})).json()
    assert [told["sent"][start:end] for start, end in told["unspoken"]] == ["你好"]


async def test_the_command_prints_the_same() -> None:
    example, answer = (json.loads(each) for each in re.findall(r"```json (?:example|answer)\n(.*?)```", TEXT, re.S))
    async with serving(FakeSynthesizer(CUSTOM_VOICE)) as url:
        printed = await asyncio.to_thread(show_text, url, SayRequest(example["input"], example["voice"]))
    assert f"spoken:   {answer['spoken']}\n" in printed
    left_out = ", ".join(f"{each['what']} ({each['count']})" for each in answer["left_out"])
    assert f"left out: {left_out}\n" in printed
    for segment in answer["segments"]:
        pause = f"{segment['pause_s']:g} s of silence, then: " if segment["pause_s"] else ""
        assert f"\n  {pause}{segment['text']}" in printed


@pytest.mark.parametrize(("sent", "spoken"), rows("sent", "spoken"))
async def test_what_is_spoken_of_marks(sent: str, spoken: str) -> None:
    status, told = await shown(input=sent.replace("<br>", "\n"))
    assert (status, told["spoken"]) == (200, spoken)
    assert (await shown(input=sent, markup="none"))[1]["spoken"] == sent


@pytest.mark.parametrize(("client", "sent", "style"), rows("clients", "sent", "style", page=TAGS))
async def test_the_style_of_each_spelling(client: str, sent: str, style: str) -> None:
    (segment,) = (await shown(input=sent))[1]["segments"]  # type: ignore[misc]
    assert (segment["text"].strip("."), segment["style"]) == ("Hello", style)  # type: ignore[has-type]


@pytest.mark.parametrize(("sent", "reported"), rows("sent", "reported", page=TAGS))
async def test_tags_without_effect_are_reported(sent: str, reported: str) -> None:
    assert (await shown(input=sent))[1]["left_out"] == [{"what": reported, "count": 1}]


@pytest.mark.parametrize(("kind", "sent", "said"), rows("kind", "sent", "read", page=ENGLISH))
def test_what_is_read_of_english(kind: str, sent: str, said: str) -> None:
    assert spoken_english(sent) == said


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


@pytest.mark.parametrize("pause", ['<break time="2s"/>', *re.findall(r"`(\[pause[^`]*\])`", TEXT)])
async def test_pauses_of_each_form_are_the_same(pause: str) -> None:
    assert pauses((await shown(input=f"One {pause} two", markup="ssml"))[1]) == [0, 2]


def pauses(told: dict[str, object]) -> list[float]:
    return [segment["pause_s"] for segment in told["segments"]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["characters", *re.findall(r"with `(.*?)` \|$", TEXT, re.M)[0].split("`")[::2]])
async def test_what_is_said_letter_by_letter(kind: str) -> None:
    told = (await shown(input=f'Say <say-as interpret-as="{kind}">A74</say-as>', markup="ssml"))[1]
    assert told["spoken"] == "Say A 7 4"


@pytest.mark.parametrize(("rate", "speed"), [("80%", 0.8), ("slow", 0.75), ("25%", 0.25), ("400%", 4.0)])
async def test_a_rate_is_the_speed_of_its_part(rate: str, speed: float) -> None:
    told = (await shown(input=f'A <prosody rate="{rate}">b</prosody>', markup="ssml"))[1]
    assert [segment["speed"] for segment in told["segments"]] == [1.0, speed]  # type: ignore[attr-defined]
    assert "from 25 % to 400 %" in TEXT
    for beyond in ("24%", "401%"):
        status, told = await shown(input=f'A <prosody rate="{beyond}">b</prosody>', markup="ssml")
        assert (status, "prosody rate" in told["error"]["message"]) == (400, True)  # type: ignore[index]


async def test_stated_pauses_have_the_limits_of_the_document() -> None:
    assert "silence of up to 10 s" in TEXT
    assert "All pauses in a text together may last up to 120 s." in TEXT
    told = (await shown(input="One [pause 11s] two" + " [pause 10s] and" * 12))[1]
    assert pauses(told) == [0, *12 * [10.0]]
    (left_out,) = told["left_out"]  # type: ignore[misc]
    assert left_out == {"what": "pause beyond 10 s, or 120 s in total", "count": 2}  # type: ignore[has-type]


async def test_a_paragraph_begins_a_segment_after_the_pause_that_is_set() -> None:
    default = TextSettings().paragraph_pause_s
    assert f"seconds ({default:g})" in TEXT
    for pause_s, expected in ((default, [0.0, default]), (2.0, [0.0, 2.0]), (0.0, [0.0])):
        settings = ApiSettings(text=TextSettings(paragraph_pause_s=pause_s))
        assert pauses((await shown(settings, input="One.\n\nTwo."))[1]) == expected
