"""Messages over one socket in any order, while utterances run, wait and fail, and the client reads or does not."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from deployments.errors import NotReady, ReplicaLost
from deployments.protocol import ModelInfo, PcmChunk, SynthesisRequest
from serve_app.config import ApiSettings
from serve_app.extensions.live import connection as sockets
from serve_app.extensions.live.session import MAX_AUDIO_BYTES
from tests.fuzz.conftest import BOUND_S, NUM_CASES
from tests.serve_app import asgi
from tests.serve_app.fake import CUSTOM_VOICE, chunk, tone, utterance
from tests.serve_app.one_model import one_api

PATH = "/v1/audio/speech/ws"
SILENCE_SIZES = (MAX_AUDIO_BYTES, 4800 - MAX_AUDIO_BYTES)  # a tenth of a second
FAILURES = (NotReady(), ReplicaLost("gone"), ValueError("secret"), MemoryError())

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SPEAK = {"type": "speak", "input": "Hello", "voice": "alloy"}
FIELDS = ("input", "voice", "model", "speed", "seed", "top_k", "temperature", "language", "max_new_tokens", "ref_audio")


class Steps:
    """Speaks one frame, then does what it is told: another frame, a failure, the end."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.told: asyncio.Queue[str | Exception] = asyncio.Queue()
        self.num_open = 0
        self.num_opened = 0
        self.unheard = ""  # the id of what ended unheard; it may be asked for again, and ends again

    async def describe(self) -> ModelInfo:
        return CUSTOM_VOICE

    async def synthesize(self, request: SynthesisRequest, info: object = None) -> AsyncGenerator[PcmChunk, None]:
        self.num_open += 1
        self.num_opened += 1
        heard = False
        try:
            while True:
                told = "end" if request.request_id == self.unheard else await self.told.get()
                match told:
                    case Exception() as error:
                        raise error
                    case "end":
                        again = request.request_id == self.unheard
                        self.unheard = "" if heard or again else request.request_id
                        yield utterance(0)[-1]
                        return
                    case _:
                        heard = True
                        yield chunk(tone(CUSTOM_VOICE.frame_samples))
        finally:
            self.num_open -= 1


STEPS = Steps()
API = one_api(STEPS, ApiSettings())


async def _bounded(work: Coroutine[Any, Any, Any]) -> Any:
    async with asyncio.timeout(BOUND_S):
        return await work


class SocketMachine(RuleBasedStateMachine):
    """One connection. The client waits for the answer that each message must have: a hang fails."""

    num_runs = 0
    num_messages = 0

    def __init__(self) -> None:
        super().__init__()
        SocketMachine.num_runs += 1
        self.runner = asyncio.Runner()
        self.run(self._open())
        self.speaking = False  # an utterance has begun, and its end has not been seen
        self.started = False  # and its first audio has

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(_bounded(work))

    async def _open(self) -> None:
        self.steps = STEPS
        self.steps.reset()
        self.connection = asgi.websocket(API, PATH)
        await self.connection.__aenter__()
        assert (await self.connection.next())["type"] == "websocket.accept"

    def send(self, **message: object) -> None:
        SocketMachine.num_messages += 1
        self.connection.receive({"type": "websocket.receive", **message})

    def say(self, value: object) -> None:
        self.send(text=json.dumps(value))

    async def event(self) -> dict[str, Any]:
        message = await self.connection.next()
        assert message["type"] == "websocket.send"
        parsed: dict[str, Any] = json.loads(message["text"])
        return parsed

    async def error(self) -> str:
        event = await self.event()
        assert (event["type"], set(event["error"])) == ("error", {"message", "type", "param", "code"})
        assert "secret" not in json.dumps(event)
        return str(event["error"]["code"])

    async def audio(self) -> None:
        if not self.started:
            assert (await self.event())["type"] == "started"
            self.started = True
        message = await self.connection.next()
        assert len(message["bytes"]) == 2 * CUSTOM_VOICE.frame_samples

    async def end(self) -> None:
        """Speech without any audio is a moment of silence."""
        if not self.started:
            assert (await self.event())["type"] == "started"
            for size in SILENCE_SIZES:
                assert len((await self.connection.next())["bytes"]) == size
        assert (await self.event())["type"] == "done"

    async def refused_or_silent(self) -> None:
        """Text with nothing to speak, such as "...", is silence."""
        event = await self.event()
        if event["type"] == "started":
            self.started = True
            for size in SILENCE_SIZES:
                assert len((await self.connection.next())["bytes"]) == size
            assert (await self.event())["type"] == "done"
        else:
            assert event["type"] == "error"

    async def begun_or_refused(self, before: int) -> None:
        while self.steps.num_opened == before and not self.connection.has_sent:  # noqa: ASYNC110, it has no event
            await asyncio.sleep(0)
        if self.steps.num_opened == before:
            await self.refused_or_silent()
        else:
            self.speaking, self.started = True, False

    def speak(self, fields: dict[str, object]) -> None:
        before = self.steps.num_opened
        self.say({**fields, "type": "speak"})
        if self.speaking:
            assert self.run(self.error()) in ("busy", "invalid_value")  # a number that is none is refused before
        else:
            self.run(self.begun_or_refused(before))

    @rule()
    def speak_properly(self) -> None:
        was_speaking = self.speaking
        self.speak(SPEAK)
        assert was_speaking or self.speaking

    @rule(fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), content=st.text(max_size=30))
    def speak_somehow(self, fields: dict[str, object], content: str) -> None:
        self.speak({"input": content, "voice": "alloy", **fields})

    @precondition(lambda self: self.speaking)
    @rule()
    def hear_a_frame(self) -> None:
        self.steps.told.put_nowait("frame")
        self.run(self.audio())

    @precondition(lambda self: self.speaking)
    @rule()
    def hear_the_end(self) -> None:
        self.steps.told.put_nowait("end")
        self.run(self.end())
        self.speaking = False

    @precondition(lambda self: self.speaking)
    @rule(error=st.sampled_from(FAILURES))
    def hear_a_failure(self, error: Exception) -> None:
        self.steps.told.put_nowait(error)
        self.run(self.error())
        self.speaking = False

    @rule()
    def cancel(self) -> None:
        self.say({"type": "cancel"})
        event = self.run(self.event())
        assert event["type"] == "cancelled"
        assert (event["request_id"] is not None) == self.speaking
        self.speaking = False

    @precondition(lambda self: self.speaking)
    @rule()
    def cancel_without_reading(self) -> None:
        self.connection.stall()
        self.steps.told.put_nowait("frame")
        self.run(self.connection.sending.wait())
        self.say({"type": "cancel"})
        self.connection.flow()
        while self.run(self.connection.next()).get("text", "").find("cancelled") < 0:
            pass
        self.speaking = False

    @rule(value=JSON)
    def say_anything(self, value: object) -> None:
        self.say(value)
        self.run(self.error())

    @rule(content=st.text(max_size=40))
    def send_text(self, content: str) -> None:
        self.send(text=content)
        self.run(self.error())

    @rule(content=st.binary(max_size=40))
    def send_bytes(self, content: bytes) -> None:
        self.send(bytes=content)
        assert self.run(self.error()) == "invalid_json"

    @rule(key=st.sampled_from(["input", "ref_audio"]), size=st.integers(8100, 9000))
    def send_too_much(self, key: str, size: int) -> None:
        self.say({"type": "speak", key: "x" * size, "ref_audio_": ""})
        self.run(self.error())

    @rule(kinds=st.lists(st.sampled_from(["cancel", "nonsense", "bytes"]), min_size=2, max_size=6))
    def send_without_waiting(self, kinds: list[str]) -> None:
        for kind in kinds:
            if kind == "bytes":
                self.send(bytes=b"")
            else:
                self.say({"type": kind})
        answers = [self.run(self.event())["type"] for _ in kinds]
        assert answers == ["cancelled" if kind == "cancel" else "error" for kind in kinds]
        self.speaking = self.speaking and "cancel" not in kinds

    @invariant()
    def nothing_speaks_unheard(self) -> None:
        assert self.steps.num_open == int(self.speaking)
        assert not self.connection.has_sent

    def teardown(self) -> None:
        self.connection.receive({"type": "websocket.disconnect", "code": 1000})
        try:
            self.run(self._close())
        finally:
            self.runner.close()

    async def _close(self) -> None:
        await self.connection.task
        assert self.steps.num_open == 0
        own = {asyncio.current_task()}
        assert asyncio.all_tasks() == own, "tasks outlive the connection"


def test_messages_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_MESSAGE_BYTES", 4096)
    monkeypatch.setattr(sockets, "MAX_BODY_BYTES", 8192)
    steps = settings.get_profile("fuzz")
    run_state_machine_as_test(SocketMachine, settings=settings(steps, stateful_step_count=12))
    print(f"\n{SocketMachine.num_runs} connections, {SocketMachine.num_messages} messages")  # noqa: T201
    assert SocketMachine.num_runs >= NUM_CASES
