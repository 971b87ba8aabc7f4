"""Messages of the dialects, whole, bent and broken, while speech goes on, fails and is left: each connection ends,
nothing runs behind it, and whatever was said in it was JSON or audio.
"""

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.types import Message

from deployments.errors import Overloaded, ReplicaLost
from deployments.protocol import ModelInfo, PcmChunk, SynthesisRequest
from serve_app.api.error_replies import translate
from serve_app.config import ApiSettings
from serve_app.extensions.live.live_text import LiveTexts
from tests.fuzz.conftest import BOUND_S, Cases, unstalled
from tests.fuzz.texts import flood, text
from tests.serve_app import asgi
from tests.serve_app.fake import FOLLOWED, followed
from tests.serve_app.one_model import one_api
from tools.suites.rows import SOCKETS, SocketRow

pytestmark = pytest.mark.anyio

Json = dict[str, Any]

FAILURES = (Overloaded("full", 1.0), ReplicaLost("gone"), ValueError("secret"))


class Chancy:
    """Speaks a followed text, breaks off, or never ends."""

    def __init__(self) -> None:
        self.chance = random.Random(0)
        self.num_open = 0
        self.failed: list[Exception] = []  # in this case

    async def describe(self) -> ModelInfo:
        return FOLLOWED

    async def synthesize(self, request: SynthesisRequest, info: object = None) -> AsyncGenerator[PcmChunk, None]:
        self.num_open += 1
        try:
            script = followed()
            for chunk in script[self.chance.choice([0, 0, 0, len(script) - 1]) :]:
                await asyncio.sleep(0)
                if self.chance.random() < 0.02:
                    self.failed.append(self.chance.choice(FAILURES))
                    raise self.failed[-1]
                if self.chance.random() < 0.01:
                    await asyncio.Event().wait()
                yield chunk
        finally:
            self.num_open -= 1


def anything(chance: random.Random, depth: int = 0) -> object:
    kind = chance.randrange(9 if depth < 2 else 7)
    if kind == 7:
        return [anything(chance, depth + 1) for _ in range(chance.randrange(3))]
    if kind == 8:
        return {text(chance)[:8]: anything(chance, depth + 1) for _ in range(chance.randrange(3))}
    return (
        *(None, True, chance.randint(-(10**20), 10**20), chance.uniform(-1e9, 1e9), text(chance), "one"),
        chance.choice((float("inf"), float("nan"))),
    )[kind]


def bent(message: Json, chance: random.Random) -> Json:
    """The message, some fields of which are something else, gone, or more."""
    fields = {name: anything(chance) if chance.random() < 0.15 else value for name, value in message.items()}
    fields = {name: value for name, value in fields.items() if chance.random() > 0.05}
    if "text" in fields and chance.random() < 0.3:
        fields["text"] = text(chance) if chance.random() < 0.9 else flood(chance)
    if "context_id" in fields and chance.random() < 0.3:
        fields["context_id"] = str(chance.randrange(20))
    if chance.random() < 0.1:
        fields[text(chance)[:10]] = anything(chance)
    return fields


def incoming(messages: list[Json], chance: random.Random) -> Message:
    match chance.randrange(20):
        case 0:
            return {"type": "websocket.receive", "bytes": chance.randbytes(chance.randrange(40))}
        case 1:
            return {"type": "websocket.receive", "text": text(chance)}
        case 2:
            return {"type": "websocket.receive", "text": json.dumps(anything(chance))}
    return {"type": "websocket.receive", "text": json.dumps(bent(chance.choice(messages), chance))}


async def test_dialects(cases: Cases) -> None:
    speaker, texts = Chancy(), LiveTexts()
    api = one_api(speaker, ApiSettings(), opened={"live": texts})
    for chance in cases:
        speaker.chance, speaker.failed = chance, []
        name = chance.choice(list(SOCKETS))
        before = asyncio.all_tasks()
        async with asyncio.timeout(BOUND_S), unstalled():
            cases.count(f"{name}: {await converse(api, SOCKETS[name], chance, speaker)}")
        await all_over(speaker, before)
    await texts.aclose()


async def all_over(speaker: Chancy, before: set[asyncio.Task[Any]]) -> None:
    """Nothing is spoken, and no task is left but the mailbox's own."""
    left: set[asyncio.Task[Any]] = set()
    try:
        async with asyncio.timeout(BOUND_S):
            while True:
                left = {task for task in asyncio.all_tasks() - before if "mailbox" not in repr(task.get_coro())}
                if not left and not speaker.num_open:
                    return
                await asyncio.sleep(0)
    except TimeoutError:
        raise AssertionError(f"{speaker.num_open} are spoken to nobody; tasks: {left}") from None


async def converse(api: Any, row: SocketRow, chance: random.Random, speaker: Chancy) -> str:
    """A connection on which the client says a dozen messages, reads or does not, and leaves. How it ended."""
    connection = asgi.websocket(api, chance.choice(row.paths), subprotocols=row.sample.protocols)
    messages = row.messages("Hello there. ")
    async with connection:
        assert (await connection.next())["type"] == "websocket.accept"
        for _ in range(chance.randrange(1, 13)):
            if chance.random() < 0.1:
                connection.stall()
            if chance.random() < 0.2:
                connection.flow()
            connection.receive(incoming(messages, chance))
            for _ in range(chance.choice([0, 1, 30])):
                await asyncio.sleep(0)
        connection.flow()
        connection.receive({"type": "websocket.disconnect", "code": 1000})
        await connection.task
    outcome = "left"
    while connection.has_sent:
        message = connection._outgoing.get_nowait()
        if message["type"] == "websocket.close":
            codes = {translate(error).code for error in speaker.failed}
            assert message["code"] != 1011 or message["reason"] in codes, message
            outcome = f"closed with {message['code']}"
        elif message.get("text") is not None:
            assert "secret" not in message["text"]
            assert isinstance(json.loads(message["text"]), dict)
        else:
            assert message["bytes"]
    return outcome
