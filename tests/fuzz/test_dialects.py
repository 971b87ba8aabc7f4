"""Messages of every dialect, in any order and of any content, while speech goes on, fails and is left: no server error,
and nothing is left speaking.
"""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal
from urllib.parse import parse_qsl

import pytest

from deployments.errors import Overloaded, ReplicaLost
from deployments.protocol import ModelInfo, PcmChunk, SynthesisRequest
from deployments.serving.mailbox import read
from serve_app.api.error_replies import translate
from serve_app.config import AdmissionSettings, ApiSettings
from serve_app.extensions.live.live_text import LiveTexts
from tests.fuzz.conftest import BOUND_S, Cases, unstalled
from tests.fuzz.texts import flood, text
from tests.serve_app import asgi
from tests.serve_app.asgi import post
from tests.serve_app.fake import CUSTOM_VOICE, followed, utterance
from tests.serve_app.one_model import one_api
from tools.suites.row import PostRow, SocketRow
from tools.suites.rows import POSTS, SOCKETS

pytestmark = pytest.mark.anyio

Json = dict[str, Any]
SEVERAL = 12  # messages of a socket at most
WAITS = AdmissionSettings(max_line_s=1000, max_wait_s=1000, max_late_s=1000)


FAILURES = (ReplicaLost("lost"), Overloaded("full", 1.0))


class Speaks:
    """A frame for each utterance, a failure now and then; it counts who is being spoken to.

    `is_live`: it speaks words, breaks off anywhere, also for a reason of the server's own, or never ends.
    """

    def __init__(self, spoken_form: Literal["english"] | None = None, *, is_live: bool = False) -> None:
        self.num_open = 0
        self.chance = random.Random(0)
        self.failed: list[Exception] = []  # in this case
        self._spoken_form: Literal["english"] | None = spoken_form
        self._is_live = is_live

    async def describe(self) -> ModelInfo:
        return replace(CUSTOM_VOICE, word_times=True, spoken_form=self._spoken_form)

    async def synthesize(self, request: SynthesisRequest, info: object = None) -> AsyncGenerator[PcmChunk, None]:
        self.num_open += 1
        try:
            if request.mailbox is not None:
                async for _ in read(request.mailbox):
                    pass
            if self.chance.random() < 0.1:
                self._fail(FAILURES)
            for step in followed() if self._is_live and self.chance.random() < 0.5 else utterance(1):
                if self._is_live:
                    await asyncio.sleep(0)
                    if self.chance.random() < 0.02:
                        self._fail((*FAILURES, ValueError("secret")))
                    if self.chance.random() < 0.01:
                        await asyncio.Event().wait()
                yield step
        finally:
            self.num_open -= 1

    def _fail(self, errors: Sequence[Exception]) -> None:
        self.failed.append(self.chance.choice(errors))
        raise self.failed[-1]


_MANY_DIGITS = "@digits@"  # stands for a number that `json` does not write
_NUMBERS = (float("nan"), float("inf"), float("-inf"), _MANY_DIGITS, "@1e999@", 2**64, -1, 1e308, 5e-324)


def written(value: object, chance: random.Random) -> str:
    told = json.dumps(value, ensure_ascii=chance.random() < 0.5)
    return told.replace(f'"{_MANY_DIGITS}"', "9" * 5000).replace('"@1e999@"', "1e999")


_VALUES: tuple[Callable[[random.Random], object], ...] = (
    text, lambda _: None, lambda chance: chance.choice((True, False)),
    lambda chance: chance.randint(-(2**70), 2**70), lambda chance: chance.choice(_NUMBERS),
    lambda chance: chance.choice((0, 1, -1, 0.5, 1e300, 2**31, 24000, 8000)),
    lambda chance: [text(chance)], lambda chance: {text(chance)[:20]: text(chance)}, lambda _: [], lambda _: {},
    lambda chance: chance.choice(("ryan", "pcm", "wav", "one", "audio/pcm", "commit", "en", "x" * 200)),
)  # fmt: skip


def filled(value: object, chance: random.Random) -> object:
    """`value` with texts in it, and now and then with something else where something was."""
    if chance.random() < 0.04:
        return chance.choice(_VALUES)(chance)
    match value:
        case bool():
            return value
        case int() | float() if chance.random() < 0.3:
            return chance.choice(_NUMBERS)
        case str() if value.strip() == "TEXT":
            if chance.random() < 0.1:
                return flood(chance)
            return text(chance)[:2000] if chance.random() < 0.5 else "Hello there. "
        case dict():
            more = {text(chance)[:10]: chance.choice(_VALUES)(chance)} if chance.random() < 0.02 else {}
            more |= {"context_id": str(chance.randrange(20))} if "context_id" in value and chance.random() < 0.3 else {}
            return {name: filled(item, chance) for name, item in value.items() if chance.random() > 0.02} | more
        case list():
            return [filled(item, chance) for item in value]
    return value


def spoiled(message: object, chance: random.Random) -> Json:
    """A frame as ASGI has it: mostly JSON."""
    told = written(message, chance).encode("utf-8", "replace").decode()
    match chance.randrange(30):
        case 0:
            told = told[: chance.randrange(len(told) + 1)]
        case 1:
            told = json.dumps(chance.choice(_VALUES)(chance))
        case 2:
            return {"type": "websocket.receive", "bytes": chance.randbytes(chance.randint(0, 20))}
    return {"type": "websocket.receive", "text": told}


def sequence(row: SocketRow, chance: random.Random) -> Iterator[Json]:
    """As a client would send them, or in any order."""
    in_order = chance.random() < 0.5
    messages = row.messages("TEXT")
    for number in range(chance.randint(1, SEVERAL)):
        message = messages[number % len(messages)] if in_order else chance.choice(messages)
        yield spoiled(filled(message, chance), chance)


@pytest.mark.parametrize("spoken_form", ["english", None])
@pytest.mark.parametrize("dialect", SOCKETS)
async def test_messages(cases: Cases, dialect: str, spoken_form: Literal["english"] | None) -> None:
    """Whatever comes: the server tells it or closes, and when the client has left nothing speaks any more."""
    before = asyncio.all_tasks()
    row, speaks, texts = SOCKETS[dialect], Speaks(spoken_form, is_live=True), LiveTexts()
    api = one_api(speaks, ApiSettings(admission=WAITS), opened={"live": texts})
    for chance in cases:
        speaks.chance, speaks.failed = chance, []
        path, _, query_string = chance.choice(row.paths).partition("?")
        query = {name: str(filled(value, chance)) for name, value in parse_qsl(query_string)}
        query = {name: value if chance.random() < 0.97 else chance.choice(_QUERY) for name, value in query.items()}
        asked = "&".join(f"{name}={_quoted(query[name])}" for name in query)
        connection = asgi.websocket(api, f"{path}?{asked}", subprotocols=row.sample.protocols)
        async with asyncio.timeout(BOUND_S), unstalled(), connection:
            first = await connection.next()
            if first["type"] == "websocket.http.response.start":
                assert 400 <= first["status"] < 500, first
                cases.count("refused")
                continue
            assert first["type"] == "websocket.accept", first
            for message in sequence(row, chance):
                connection.stall() if chance.random() < 0.1 else connection.flow()
                connection.receive(message)
                for _ in range(chance.choice((0, 0, 1, 30))):
                    await asyncio.sleep(0)
            connection.flow()
            if chance.random() < 0.5:
                await _listen(connection, chance, speaks)
            connection.receive({"type": "websocket.disconnect", "code": 1000})
            await asyncio.wait((connection.task,))
            assert connection.task.exception() is None
        while connection.has_sent:
            _check(await connection.next(), speaks)
        assert speaks.num_open == 0, "somebody is being spoken to"
        cases.count("spoken to")
    await texts.aclose()
    for _ in range(10):  # those that were cancelled just now
        await asyncio.sleep(0)
    left = {task for task in asyncio.all_tasks() - before if not task.done()}
    assert not left, "tasks outlive the connections"


def _quoted(value: str) -> str:
    return "".join(f"%{byte:02x}" for byte in value.encode("utf-8", "replace")[:300])


async def _listen(connection: asgi.Connection, chance: random.Random, speaks: Speaks) -> None:
    """To some of what comes; not everything is answered."""
    for _ in range(chance.randint(1, 5)):
        for _ in range(50):
            if connection.has_sent or connection.task.done():
                break
            await asyncio.sleep(0)
        if connection.has_sent:
            _check(await connection.next(), speaks)


_QUERY = ("nan", "inf", "-inf", "1e999", "9" * 290, "mp3_44100_" + "9" * 280)


def _check(message: Mapping[str, Any], speaks: Speaks) -> None:
    """No error of the server's own, which its failures above are not."""
    if message["type"] == "websocket.close":
        assert message.get("code", 1000) in (1000, 1008, 1011, 1013), message
        codes = {translate(error).code for error in speaks.failed}
        assert message.get("code", 1000) != 1011 or message["reason"] in codes, message
    elif message.get("text") is not None:
        told = json.loads(message["text"])
        assert isinstance(told, dict)
        assert "secret" not in message["text"]
        has_failed = any(isinstance(error, ValueError) for error in speaks.failed)
        assert has_failed or "internal_error" not in message["text"], message
    else:
        assert message["bytes"]


@pytest.mark.parametrize("row", POSTS.values(), ids=POSTS)
async def test_bodies(cases: Cases, row: PostRow) -> None:
    speaks = Speaks()
    api = one_api(speaks, ApiSettings(admission=WAITS))
    for chance in cases:
        speaks.chance = chance
        content = written(filled(row.body("TEXT", **row.more), chance), chance)
        if chance.random() < 0.03:
            content = content[: chance.randrange(len(content))]
        try:
            async with unstalled():
                answer = await post(api, row.path, content.encode("utf-8", "replace"))
        except RuntimeError as error:  # behind the first audio of a long text: never a clean end
            if not isinstance(error.__cause__, ReplicaLost | Overloaded):
                raise
            cases.count("broken off")
            assert speaks.num_open == 0
            continue
        cases.count(answer.status)
        assert answer.status in (200, 400, 404, 413, 429, 503), answer
        assert b"internal_error" not in answer.content
        assert speaks.num_open == 0
        if answer.status >= 400:
            assert set(json.loads(answer.content)["error"]) == {"message", "type", "param", "code"}


FORMS = (
    "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "multipart/form-data",
    "multipart/form-data; boundary=" + "x" * 300, "text/plain",
)  # fmt: skip


async def test_forms(cases: Cases) -> None:
    speaks = Speaks()
    api = one_api(speaks, ApiSettings(admission=WAITS))
    for chance in cases:
        said = text(chance)[:500].encode("utf-8", "replace")
        part = b'--x\r\nContent-Disposition: form-data; name="text"\r\n\r\n' + said + b"\r\n--x--\r\n"
        content = chance.choice((part, b"text=" + said, chance.randbytes(chance.randint(0, 200))))
        place = chance.randrange(len(content) + 1)
        if chance.random() < 0.5:
            content = content[:place] + chance.randbytes(chance.randint(0, 3)) + content[place + chance.randint(0, 3) :]
        try:
            answer = await post(api, "/generate", content, content_type=chance.choice(FORMS))
        except RuntimeError as error:
            if not isinstance(error.__cause__, ReplicaLost | Overloaded):
                raise
            cases.count("broken off")
            continue
        cases.count(answer.status)
        assert answer.status in (200, 400, 429, 503), answer
        assert speaks.num_open == 0
