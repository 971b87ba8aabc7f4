"""Markup, lexicons and pauses at the doors of all dialects, and where lexicons are kept."""

import asyncio
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from httpx import AsyncClient
from typer.testing import CliRunner

from serve_app.cli.main import cli
from serve_app.config import ApiSettings
from serve_app.extensions.text.reading import TextSettings
from serve_app.extensions.voices.extension import open_voices
from serve_app.extensions.voices.settings import VoiceSettings
from tests.serve_app.extensions.client import Json, heard
from tests.serve_app.extensions.voices.speakers import Server, store
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, pcm_of, utterance
from tests.serve_app.one_model import client_for, client_of, one_api, posted
from tools.suites.rows import POSTS, SOCKETS, here, is_here

pytestmark = pytest.mark.anyio

SPEECH = "/v1/audio/speech"
ELEVEN = "/v1/text-to-speech/ryan"
SSML = f"{ELEVEN}?enable_ssml_parsing=true"


PAUSES: list[tuple[str, Json, list[str], float]] = [
    (SPEECH, {"input": "One [pause:2s] two", "voice": "ryan"}, ["One", "two"], 2),
    (SPEECH, {"input": "One<break time='1s'/>two", "voice": "ryan", "ssml": True}, ["One", "two"], 1),
    ("/v1/speak?encoding=linear16&container=none", {"text": "One \\{pause:500ms\\} two"}, ["One", "two"], 0.5),
    (f"{SSML}&output_format=pcm_24000", {"text": "One &lt; <break/>two"}, ["One <", "two"], 0.4),
    ("/tts/bytes", {"transcript": 'One <break time="300ms"/> two', "voice": "ryan"}, ["One", "two"], 0.3),
]


@pytest.mark.parametrize(("path", "body", "texts", "pause_s"), [row for row in PAUSES if is_here(row[0])])
async def test_pauses_of_each_dialect(path: str, body: Json, texts: list[str], pause_s: float) -> None:
    synthesizer = FakeSynthesizer(script=utterance(1))
    more = {"response_format": "pcm"} if path == SPEECH else {}
    answer = await posted(synthesizer, path, json={**body, **more})
    assert synthesizer.texts == texts
    speech = pcm_of(utterance(1))
    assert answer.content == speech + bytes(2 * int(24000 * pause_s)) + speech
    assert "x-ignored" not in answer.headers


ALONE = (
    *("</expr>", "</prosody>", '<emotion value="sad"/>', "[whispers]", "[/sad]", "[laughs]", "</think>", "<b></b>"),
    *("<speak></speak>", '<speed ratio="0.9"/>', "<break time='1s'/>", "**"),
)  # as agents send, which speak each sentence by itself


@pytest.mark.parametrize("text", ALONE)
async def test_tags_alone_are_a_moment_of_silence(text: str) -> None:
    answer = await posted(FakeSynthesizer(), SPEECH, json={"input": text, "voice": "ryan", "response_format": "pcm"})
    assert (answer.status_code, answer.content) == (200, bytes(2 * 2400)), answer.text


REFUSED: list[tuple[str, Json, str, str]] = [
    (SPEECH, {"input": "<b>a", "voice": "ryan", "markup": "ssml"}, "input", "at character 4: "),
    (SPEECH, {"input": "a", "voice": "ryan", "markup": "html"}, "markup", "'auto', 'none' or 'ssml'"),
    (SPEECH, {"input": "a", "voice": "ryan", "lexicon": {"a": "ˈa"}}, "lexicon", "phonemes are not supported"),
    (SPEECH, {"input": "a", "max_segment_chars": 49}, "max_segment_chars", "greater than or equal to 50"),
    (SPEECH, {"input": "```\ncode\n```", "voice": "ryan"}, "input", "all text is left out (code block)"),
    (SPEECH, {"input": "[sad]<think>So.</think>", "voice": "ryan"}, "input", "(reasoning of a language model"),
    ("/tts/bytes", {"transcript": "a <<h|i>>", "voice": "ryan"}, "transcript", "'<<h|i>>' at character 2"),
    (SSML, {"text": "<phoneme>a</phoneme>"}, "text", "phonemes are not supported"),
]


@pytest.mark.parametrize(("path", "body", "param", "reason"), [row for row in REFUSED if is_here(row[0])])
async def test_what_is_refused_says_where(client: AsyncClient, path: str, body: Json, param: str, reason: str) -> None:
    answer = await client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert reason in error["message"]


@pytest.mark.parametrize("name", ["", *here("native", "nari", "vllm-omni")])
@pytest.mark.parametrize(
    ("markup", "texts"),
    [("auto", ["Hi", "you"]), ("none", ["**Hi** <break time='1s'/> you"]), ("ssml", ["**Hi**", "you"])],
)
async def test_a_request_chooses_its_markup_whole_and_live(name: str, markup: str, texts: list[str]) -> None:
    text, synthesizer = "**Hi** <break time='1s'/> you", FakeSynthesizer(script=utterance(1))
    if not name:
        answer = await posted(synthesizer, SPEECH, json={"input": text, "voice": "ryan", "markup": markup})
        assert answer.status_code == 200
    else:
        row, pieces = SOCKETS[name], [text[at : at + 5] for at in range(0, len(text), 5)]
        first, *rest = row.speak_in_parts(*pieces) if row.split_utterance else row.speak(text)
        first["markup"] = markup
        await heard(synthesizer, row.path, first, *rest, until=row.ends_with, subprotocols=row.sample.protocols)
    assert [each.strip() for each in synthesizer.texts] == texts


async def test_settings_say_how_texts_are_read() -> None:
    synthesizer = FakeSynthesizer(script=utterance(1))
    text = TextSettings(markup="none", paragraph_pause_s=0, max_segment_chars=50)
    async with client_for(synthesizer, ApiSettings(text=text)) as client:
        await client.post(SPEECH, json={"input": "*a*\n\nb", "voice": "ryan"})
        sent = "A sentence that is thirty long. " * 2
        await client.post(SPEECH, json={"input": sent, "voice": "ryan"})
        most = CUSTOM_VOICE.max_segment_chars
        told = [
            await client.post(path, json={"input": sent, "voice": "ryan", "max_segment_chars": chars})
            for path, chars in ((SPEECH, most), (SPEECH, most + 1), ("/v1/audio/text", most + 1))
        ]
        shown = (await client.post("/v1/audio/text", json={"input": sent, "voice": "ryan"})).json()
    assert len(shown["segments"]) == 2
    assert synthesizer.texts == ["*a* b", *2 * ["A sentence that is thirty long."], *2 * [sent.strip()]]
    assert ["max_segment_chars" in answer.headers.get("x-ignored", "") for answer in told] == [False, True, True]


async def lexicon(folder: Path, *arguments: str, code: int = 0) -> None:
    """A command has an event loop of its own."""
    invoke = partial(CliRunner().invoke, cli, ["lexicon", *arguments, "--store", str(folder)])
    result = await asyncio.to_thread(copy_context().run, invoke)
    assert (result.exit_code != 0) == bool(code), result.output


async def test_the_lexicon_of_the_server_holds_for_every_dialect(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    await lexicon(folder, "add", "SQL", "sequel")
    await lexicon(folder, "add", "nginx", "engine x")
    await lexicon(folder, "remove", "nginx")
    await lexicon(folder, "add", "a", "ˈeɪ", code=1)
    synthesizer, other = FakeSynthesizer(script=utterance(1)), [*POSTS.values()][-1]
    voices = open_voices(VoiceSettings(store=str(folder)))
    voices.follow()  # as an ingress replica does
    async with client_of(one_api(synthesizer, ApiSettings(), opened={"voices": voices})) as client:
        await client.post(SPEECH, json={"input": "SQL and nginx", "voice": "ryan"})
        await client.post(other.path, json=other.body("SQL"))
        await client.post(SPEECH, json={"input": "SQL", "voice": "ryan", "lexicon": {"SQL": "S Q L"}})
    assert synthesizer.texts == ["sequel and nginx", "sequel", "S Q L"]


async def test_a_stored_voice_has_a_lexicon_of_its_own(tmp_path: Path) -> None:
    server = Server(tmp_path / "store")
    async with server.client() as client:
        told = await store(client, "ada")
        changed = await client.post(f"/v1/audio/voices/{told['id']}", json={"lexicon": {"SQL": "sequel"}})
        assert changed.json()["lexicon"] == {"SQL": "sequel"}
        bad = await client.post(f"/v1/audio/voices/{told['id']}", json={"lexicon": {"SQL": "ˈs"}})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "lexicon")
        for own in ({}, {"lexicon": {"SQL": "S Q L"}}):
            await client.post(SPEECH, json={"input": "SQL", "voice": "ada", **own})
    assert server.synthesizer.texts == ["sequel", "S Q L"]


FIGURES = "Der Zug fährt um 8:05 und kostet 3,50 €."
IN_WORDS = "Der Zug fährt um acht Uhr fünf und kostet drei Euro fünfzig."


@pytest.mark.parametrize(
    ("body", "spoken"),
    [
        ({"input": FIGURES, "text_normalization": "on"}, IN_WORDS),
        ({"input": FIGURES, "text_normalization": "off"}, FIGURES),
        ({"input": FIGURES}, FIGURES),
        ({"input": FIGURES, "normalization_options": {"normalize": True}}, IN_WORDS),
        ({"input": FIGURES, "normalization_options": {"normalize": False}}, FIGURES),
        ({"text": FIGURES, "apply_text_normalization": "on"}, IN_WORDS),
        ({"text": FIGURES, "apply_text_normalization": "auto"}, FIGURES),
        ({"text": FIGURES, "apply_text_normalization": "off"}, FIGURES),
    ],
)
@pytest.mark.parametrize("language", ["de", None])
async def test_figures_become_words_where_this_is_wished(
    client: AsyncClient, synthesizer: FakeSynthesizer, body: Json, spoken: str, language: str | None
) -> None:
    named = {} if language is None else {"language_code" if "text" in body else "language": language}
    answer = await client.post(ELEVEN if "text" in body else SPEECH, json={**body, **named})
    assert answer.status_code == 200, answer.text
    assert "text_normalization" not in answer.headers.get("x-ignored", "")
    assert synthesizer.texts == [spoken]


async def test_figures_in_a_language_that_is_not_certain_are_an_error_or_named(client: AsyncClient) -> None:
    refused = await client.post(SPEECH, json={"input": "12:30", "voice": "ryan", "text_normalization": "on"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text_normalization")
    lenient = await client.post(ELEVEN, json={"text": "12:30", "apply_text_normalization": "on"})
    assert "apply_text_normalization (the language of the text is uncertain" in lenient.headers["x-ignored"]
    wrong = await client.post(ELEVEN, json={"text": "1", "apply_text_normalization": "yes"})
    assert (wrong.status_code, "text_normalization: Input should be 'on' or 'off'" in wrong.text) == (400, True)


async def test_figures_become_words_while_they_are_written() -> None:
    begin, end = FIGURES[:20], FIGURES[20:]
    german = {"enable_tn": True, "language_type": "German"}
    written = ({"type": "input_text_buffer.append", "text": text} for text in (begin, end))
    session = [{"type": "session.update", "session": german}, *written, {"type": "session.finish"}]
    path = "/v1/text-to-speech/ryan/stream-input?apply_text_normalization=on&language_code=de"
    pieces = [{"text": text} for text in (" ", begin, end, "")]
    for place, messages in (
        (place, said) for place, said in (("/api-ws/v1/realtime", session), (path, pieces)) if is_here(place)
    ):
        synthesizer = FakeSynthesizer(script=utterance())
        await heard(synthesizer, place, *messages, until={"closed": 1000})
        assert [text.strip() for text in synthesizer.texts] == [IN_WORDS]


async def test_an_embedded_voice_reads_figures_in_any_case(client: AsyncClient, synthesizer: FakeSynthesizer) -> None:
    synthesizer.info = replace(CUSTOM_VOICE, spoken_form="english")
    body = {"input": "I have 3 cats.", "voice": "ryan"}
    off = await client.post(SPEECH, json={**body, "text_normalization": "off"})
    assert "text_normalization (the loaded voice always normalizes text)" in off.headers["x-ignored"]
    on = await client.post(SPEECH, json={**body, "text_normalization": "on"})
    assert "x-ignored" not in on.headers
    assert synthesizer.texts == ["I have three cats."] * 2


@pytest.mark.parametrize(
    ("instructions", "is_followed"),
    [("Speak slowly.", True), ("Hushed, please", True), ("Speak like a pirate.", False), ("Not too fast!", False)],
)
async def test_instructions_that_a_voice_was_not_trained_on_are_reported(
    client: AsyncClient, synthesizer: FakeSynthesizer, instructions: str, is_followed: bool
) -> None:
    synthesizer.info = replace(CUSTOM_VOICE, spoken_form="english")
    answer = await client.post(SPEECH, json={"input": "Hi.", "voice": "ryan", "instructions": instructions})
    reason = "instructions (the loaded voice can only speak slower, faster or more quietly)"
    assert answer.headers.get("x-ignored") == (None if is_followed else reason)


async def test_each_segment_is_spoken_in_its_own_language(client: AsyncClient, synthesizer: FakeSynthesizer) -> None:
    german, english = "Das Treffen wurde auf Donnerstag verschoben.", "The meeting was moved to Thursday."
    body = {"input": f"{german}\n\n12:30\n\n{english} {english} {english}", "voice": "ryan", "language": "detect"}
    answer = await client.post(SPEECH, json=body)
    assert answer.status_code == 200, answer.text
    assert "x-ignored" not in answer.headers
    await client.post(SPEECH, json={**body, "input": "12:30"})
    languages = [request.language for request in synthesizer.requests]
    assert languages == ["german", "english", "english", "auto"]  # the second is the whole text's
