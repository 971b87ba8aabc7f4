"""With `api.continuity.joints` the utterances of one conversation go on from each other, over all sockets."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from deployments.protocol import SynthesisRequest
from serve_app.config import ApiSettings
from serve_app.extensions.continuity.tails import ContinuitySettings
from tests.serve_app.extensions.client import Client, Json, talking
from tests.serve_app.fake import FakeSynthesizer, utterance
from tools.suites.row import SocketRow
from tools.suites.rows import SOCKETS, here

pytestmark = pytest.mark.anyio

ONE, TWO, THREE = "Hello there, all of you.", "And this comes after it.", "That is the end."
SPEAK: Json = {"type": "speak", "voice": "ryan"}
NO_TAIL = "no recent finished request with this voice has this ID"
CONVERSING = {name: row for name, row in SOCKETS.items() if row.closing.stays_open and row.is_continued}


@asynccontextmanager
async def conversing(
    path: str, *, joints: bool = True, subprotocols: Sequence[str] = ()
) -> AsyncIterator[tuple[Client, FakeSynthesizer]]:
    synthesizer = FakeSynthesizer(script=utterance(20))
    settings = ApiSettings(continuity=ContinuitySettings(joints=joints))
    async with talking(synthesizer, path, settings=settings, subprotocols=subprotocols) as client:
        yield client, synthesizer


async def say(client: Client, row: SocketRow, text: str, *, again: bool) -> None:
    client.send(*row.speak(text, again=again))
    kind, value = next(iter(row.ends_with.items()))
    await client.until(**{kind: value})


def tails(requests: list[SynthesisRequest]) -> list[str | None]:
    return [None if request.tail is None else request.tail.text.strip() for request in requests]


@pytest.mark.parametrize("joints", [True, False])
@pytest.mark.parametrize("row", CONVERSING.values(), ids=CONVERSING)
async def test_an_utterance_goes_on_from_the_one_before(row: SocketRow, *, joints: bool) -> None:
    async with conversing(row.path, joints=joints, subprotocols=tuple(row.sample.protocols)) as (client, synthesizer):
        for number, text in enumerate((ONE, TWO, THREE)):
            await say(client, row, text, again=number > 0)
    assert tails(synthesizer.requests) == ([None, ONE, TWO] if joints else [None, None, None])


@pytest.mark.parametrize("name", here("native", "flux", "realtime"))
async def test_after_an_interruption_the_voice_begins_anew(name: str) -> None:
    row = SOCKETS[name]
    async with conversing(row.path) as (client, synthesizer):
        await say(client, row, ONE, again=False)
        synthesizer.script = utterance(200)
        client.send(*row.speak(TWO, again=True))
        while len(synthesizer.requests) < 2 or not synthesizer.requests[1]:
            await client.next()
        assert row.stop is not None
        assert row.stop.answer is not None
        client.send(row.stop.message)
        kind, value = next(iter(row.stop.answer.items()))
        await client.until(**{kind: value})
        synthesizer.script = utterance(20)
        await say(client, row, THREE, again=True)
    assert tails(synthesizer.requests) == [None, ONE, None]


@pytest.mark.parametrize("name", here("elevenlabs"))
async def test_flushes_of_a_context_of_elevenlabs_go_on_from_each_other_and_contexts_do_not(name: str) -> None:
    async with conversing(SOCKETS[name].path) as (client, synthesizer):
        for own in ("a", "b"):
            client.send(*({"text": f"{text} ", "context_id": own, "flush": True} for text in (ONE, TWO)))
            client.send({"text": "", "context_id": own, "flush": True}, {"context_id": own, "close_context": True})
            await client.until(contextId=own, isFinal=True)
    assert tails(synthesizer.requests) == [None, ONE, None, ONE]


@pytest.mark.parametrize("name", here("cartesia"))
async def test_a_flush_of_cartesias_continuation_goes_on_and_another_context_does_not(name: str) -> None:
    body = dict(SOCKETS[name].speak(ONE)[0])
    async with conversing(SOCKETS[name].path) as (client, synthesizer):
        for own in ("a", "b"):
            client.send({**body, "context_id": own, "continue": True, "flush": True})
            client.send({**body, "context_id": own, "transcript": TWO})
            await client.until(type="done", context_id=own)
    assert tails(synthesizer.requests) == [None, ONE, None, ONE]


@pytest.mark.parametrize("name", here("cartesia"))
async def test_a_continuation_of_cartesia_is_one_text_whose_segments_are_joined(name: str) -> None:
    body = dict(SOCKETS[name].speak("")[0])
    long = "This sentence is long enough that it need not wait for any more of the text to be written. "
    async with conversing(SOCKETS[name].path) as (client, synthesizer):
        for text in (f"{ONE}\n\n", long, long):
            client.send({**body, "transcript": text, "continue": True})
        client.send({**body, "transcript": THREE})
        await client.until(type="done")
    assert tails(synthesizer.requests) == [None, ONE]


@pytest.mark.parametrize("name", here("flux"))
@pytest.mark.parametrize(("text", "tail"), [("And ", None), (f"{TWO}\n\nAnd ", ONE)], ids=["begun", "paragraph"])
async def test_whole_paragraphs_have_a_joint_and_text_just_begun_none(name: str, text: str, tail: str | None) -> None:
    async with conversing(SOCKETS[name].path) as (client, synthesizer):
        await say(client, SOCKETS[name], ONE, again=False)
        client.send({"type": "Speak", "text": text})
        while len(synthesizer.requests) < 2:
            await client.next()
    assert tails(synthesizer.requests) == [None, tail]


@pytest.mark.parametrize("name", here("native"))
async def test_another_voice_begins_anew(name: str) -> None:
    async with conversing(SOCKETS[name].path) as (client, synthesizer):
        for voice in ("ryan", "serena", "serena"):
            client.send({**SPEAK, "input": ONE, "voice": voice})
            await client.until(type="done")
    assert tails(synthesizer.requests) == [None, None, ONE]


@pytest.mark.parametrize("name", here("native"))
async def test_our_socket_names_what_an_utterance_goes_on_from_and_takes_it_to_resume(name: str) -> None:
    async with conversing(SOCKETS[name].path) as (client, synthesizer):
        told = []
        for fields in ({}, {}, {"seed": 5}, {"seed": 5, "previous_request_id": "conn-1"}, {}):
            client.send({**SPEAK, "input": TWO, **fields})
            told += [message for message in (await client.until(type="done"))[0] if message["type"] == "started"]
    assert [message.get("previous_request_id") for message in told] == [None, "conn-1", None, "conn-1", "conn-4"]
    assert tails(synthesizer.requests) == [None, TWO, None, TWO, TWO]
    assert all("ignored" not in message and "tail" not in message for message in told)


@pytest.mark.parametrize("name", here("native"))
@pytest.mark.parametrize("joints", [True, False])
async def test_a_request_that_our_socket_is_told_counts_whatever_the_setting(name: str, *, joints: bool) -> None:
    async with conversing(SOCKETS[name].path, joints=joints) as (client, synthesizer):
        ignored = []
        for previous_id in (None, "conn-1", "nobody-knows"):
            client.send({**SPEAK, "input": ONE, "previous_request_id": previous_id})
            started, *_ = (await client.until(type="done"))[0]
            ignored.append(started.get("ignored"))
    assert tails(synthesizer.requests) == [None, ONE, None]
    assert ignored == [None, None, [{"field": "previous_request_id", "reason": NO_TAIL}]]
