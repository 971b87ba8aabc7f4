"""Sessions that outlast rolling updates lose nothing but idle sockets, which are told to connect again.

And contexts of one socket, whose calls Serve cancels when one of them is cancelled, cost their siblings nothing.
"""

import asyncio
import base64
import itertools
import os
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from serve_app.config import AdmissionSettings, ApiSettings, AppConfig
from tests.e2e.speech import EXPORTED_S
from tools.suites.pools import CODEC, TALKER, Service, config, redeploy, serving

pytestmark = pytest.mark.anyio

UPDATES = int(os.environ.get("TALKRAY_UPDATES", "10"))
INGRESS = "Ingress"
SERVICE_RESTART = 1012
WORDS = "Good morning, how can I help you? I can look that up.".split()  # noqa: SIM905
WORD_S = 0.15  # as a language model writes
LONGEST_PAUSE_S = 2.5  # of a caller between two turns
LEAST_S = 1.5  # of audio that these words are, at the least
BYTES_PER_S = 2 * 24000
BOUND_S = 240.0  # of one update
CROSSED_S = 0.3  # a turn's first message may cross the close of an idle socket for so long: two busy cores
SIBLINGS_WORDS = 15 * WORDS
CANCELLED, BURST = 40, 2  # more bursts than replicas may die under one stream

PATIENT = AdmissionSettings(max_line_s=100, max_wait_s=100, max_late_s=100)  # replicas start beside the speech

Message = dict[str, Any]


class LostError(Exception):
    """A turn that did not come to its end."""


class CrossedError(Exception):
    """An idle socket was closed while the first message of a turn was on its way."""


@dataclass(slots=True)
class Heard:
    turns: Counter[str] = field(default_factory=Counter)  # by kind of session
    closed: Counter[str] = field(default_factory=Counter)  # sockets that were idle
    crossed: Counter[str] = field(default_factory=Counter)  # of them, those closed as a turn began
    lost: list[str] = field(default_factory=list)


class Session(ABC):
    """A voice agent's: it speaks turns, and connects again where it is told to between two of them."""

    path: str

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, chance: random.Random) -> None:
        self._socket, self._chance = socket, chance
        self._began_s, self._is_answered = time.monotonic(), False

    async def speak(self) -> None:
        """A turn to its end. Raises LostError, CrossedError."""
        self._began_s, self._is_answered = time.monotonic(), False
        await self.turn()

    async def pause(self) -> bool:
        """While the caller speaks: False where the socket is closed meanwhile, as an idle one may be."""
        try:
            message = await self._socket.receive(timeout=self._chance.uniform(0.2, LONGEST_PAUSE_S))
        except TimeoutError:
            return True
        if message.type is aiohttp.WSMsgType.CLOSE and message.data == SERVICE_RESTART and message.extra:
            return False
        raise LostError(f"between two turns: {message}")

    @abstractmethod
    async def turn(self) -> None:
        """One of them, to its end. Raises LostError."""

    async def send(self, **fields: object) -> None:
        await self._socket.send_json(fields)

    async def told(self) -> Message | bytes:
        message = await self._socket.receive(timeout=60)
        is_new = not self._is_answered and time.monotonic() < self._began_s + CROSSED_S
        if is_new and message.type is aiohttp.WSMsgType.CLOSE and message.data == SERVICE_RESTART:
            raise CrossedError
        self._is_answered = True
        if message.type is aiohttp.WSMsgType.BINARY:
            audio: bytes = message.data
            return audio
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise LostError(f"in a turn: {message}")
        fields: Message = message.json()
        return fields

    def check(self, num_bytes: int) -> None:
        """Whether it was all of the turn's audio."""
        if num_bytes < LEAST_S * BYTES_PER_S:
            raise LostError(f"a turn of {num_bytes / BYTES_PER_S:.2f} s")


class Flux(Session):
    """Deepgram's, whose turns are written while they are spoken."""

    path = "/v2/speak?model=flux-nora-en&encoding=linear16&sample_rate=24000"

    async def turn(self) -> None:
        writing = asyncio.create_task(self._write())
        num_bytes = 0
        try:
            while True:
                match await self.told():
                    case bytes(audio):
                        num_bytes += len(audio)
                    case {"type": "SpeechMetadata"}:
                        break
                    case {"type": "Error" | "Warning"} as error:
                        raise LostError(str(error))
            await writing
        finally:
            writing.cancel()
        self.check(num_bytes)

    async def _write(self) -> None:
        for word in WORDS:
            await self.send(type="Speak", text=f"{word} ")
            await asyncio.sleep(WORD_S)
        await self.send(type="Flush")


class Contexts(Session):
    """ElevenLabs': two contexts at once, each of two sentences with a silence between them."""

    path = "/v1/text-to-speech/nora/multi-stream-input?output_format=pcm_24000"
    numbers = itertools.count()

    async def turn(self) -> None:
        names = [f"context-{next(self.numbers)}" for _ in range(2)]
        writing = [asyncio.create_task(self._write(name)) for name in names]
        num_bytes, speaking = Counter[str](), {*names}
        try:
            while speaking:
                match await self.told():
                    case {"error": _} as error:
                        raise LostError(str(error))
                    case {"contextId": name, "isFinal": True}:
                        speaking.remove(name)
                    case {"contextId": name, "audio": str(audio)}:
                        num_bytes[name] += len(base64.b64decode(audio))
            await asyncio.gather(*writing)
        finally:
            for task in writing:
                task.cancel()
        for name in names:
            self.check(num_bytes[name] // 2)

    async def _write(self, name: str) -> None:
        for _ in range(2):
            for word in WORDS:
                await self.send(text=f"{word} ", context_id=name)
                await asyncio.sleep(WORD_S)
            await self.send(text=" ", flush=True, context_id=name)
            await asyncio.sleep(self._chance.uniform(0, LONGEST_PAUSE_S))
        await self.send(text="", flush=True, context_id=name)
        await self.send(close_context=True, context_id=name)


class Realtime(Session):
    """OpenAI's: a turn is asked for whole."""

    path = "/v1/realtime?model=gpt-realtime"

    async def turn(self) -> None:
        text = {"type": "input_text", "text": " ".join(WORDS)}
        await self.send(type="conversation.item.create", item={"type": "message", "role": "user", "content": [text]})
        await self.send(type="response.create")
        num_bytes = 0
        while True:
            match await self.told():
                case {"type": "response.output_audio.delta", "delta": audio}:
                    num_bytes += len(base64.b64decode(audio))
                case {"type": "response.done", "response": {"status": status}}:
                    break
                case {"type": "error"} as error:
                    raise LostError(str(error))
        if status != "completed":
            raise LostError(f"a response that is {status}")
        self.check(num_bytes)


async def converse(
    http: aiohttp.ClientSession, kind: type[Session], heard: Heard, over: asyncio.Event, *, seed: int
) -> None:
    """Sessions of one kind, each as long as the server lets it be."""
    chance = random.Random(seed)
    while not over.is_set():
        try:
            async with http.ws_connect(kind.path) as socket:
                session = kind(socket, chance)
                while not over.is_set():
                    await session.speak()
                    heard.turns[kind.__name__] += 1
                    if not await session.pause():
                        heard.closed[kind.__name__] += 1
                        break
        except CrossedError:
            heard.closed[kind.__name__] += 1
            heard.crossed[kind.__name__] += 1
        except (LostError, TimeoutError, aiohttp.ClientError) as error:
            heard.lost.append(f"{kind.__name__}: {type(error).__name__} {error}")
            await asyncio.sleep(0.5)


async def ask(http: aiohttp.ClientSession, heard: Heard, over: asyncio.Event) -> None:
    """HTTP requests one after the other, each on a connection of its own, heard as slowly as they play."""
    body = {"input": " ".join(3 * WORDS), "voice": "nora", "response_format": "pcm", "seed": 7}
    first_pcm: bytes | None = None
    while not over.is_set():
        try:
            pcm, began_s = bytearray(), time.monotonic()
            async with http.post("/v1/audio/speech", json=body) as answer:
                if answer.status != 200:
                    raise LostError(f"{answer.status}: {await answer.text()}")
                async for part in answer.content.iter_any():
                    pcm += part
                    await asyncio.sleep(max(0.0, began_s + len(pcm) / BYTES_PER_S - 1 - time.monotonic()))
            first_pcm = first_pcm or bytes(pcm)
            if len(pcm) != len(first_pcm):
                raise LostError(f"{len(pcm)} bytes of {len(first_pcm)}")
            heard.turns["HTTP"] += 1
        except (LostError, TimeoutError, aiohttp.ClientError) as error:
            heard.lost.append(f"HTTP: {type(error).__name__} {error}")
            await asyncio.sleep(0.5)


@pytest.fixture
def updated() -> Iterator[Service]:
    """Two replicas of each pool, which speak the embedded voice: its sentences have a length."""
    app = config(Path("embedded"))
    ingress = app.ingress_pool.model_copy(update={"replicas": 2})
    with serving(variant(app.model_copy(update={"ingress_pool": ingress}), 0)) as service:
        yield service


@asynccontextmanager
async def sessions(service: Service, heard: Heard) -> AsyncIterator[None]:
    """Of four transports, while this lasts; all turns that have begun end."""
    over = asyncio.Event()
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(
        service.url, connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_read=60)
    ) as http:
        kinds = (Flux, Contexts, Realtime)
        speaking = [
            *(asyncio.create_task(converse(http, kind, heard, over, seed=n)) for n, kind in enumerate(kinds)),
            asyncio.create_task(ask(http, heard, over)),
        ]
        try:
            while len(heard.turns) < 1 + len(kinds):
                assert not any(task.done() for task in speaking)
                await asyncio.sleep(0.1)
            yield
        finally:
            over.set()
            await asyncio.gather(*speaking)


def variant(app: AppConfig, number: int) -> AppConfig:
    """`app`, each of whose pools Serve replaces."""
    return app.model_copy(
        update={
            "talker": app.talker.model_copy(update={"max_num_seqs": 8, "max_num_waiting": 64 + number}),
            "api": ApiSettings(admission=PATIENT.model_copy(update={"max_late_s": 100.0 + number})),
        }
    )


async def test_rolling_updates_lose_nothing_but_idle_sockets(updated: Service) -> None:
    heard = Heard()
    async with sessions(updated, heard):
        for number in range(1, UPDATES + 1):
            began_s = time.monotonic()
            before = {process for pool in (TALKER, CODEC, INGRESS) for process in updated.processes(pool)}
            turns = heard.turns.total()
            await asyncio.to_thread(redeploy, variant(updated.app, number), {TALKER: 2, CODEC: 2, INGRESS: 2})
            while before & {process for pool in (TALKER, CODEC, INGRESS) for process in updated.processes(pool)}:
                assert time.monotonic() < began_s + BOUND_S, "an old replica does not end"
                await asyncio.sleep(0.2)
            took_s = time.monotonic() - began_s
            print(
                f"update {number}: {took_s:.0f} s, {heard.turns.total() - turns} turns, lost {heard.lost}", flush=True
            )
            for pool in (TALKER, CODEC, INGRESS):
                await asyncio.to_thread(updated.wait_for, pool, 2)
    closed = f"{dict(heard.closed)}, of them as a turn began {dict(heard.crossed)}"
    print(f"turns {dict(heard.turns)}, idle sockets closed {closed}, lost {heard.lost}")
    assert heard.lost == []
    assert heard.closed.total() >= UPDATES
    assert 5 * heard.crossed.total() <= heard.closed.total()


@pytest.fixture(params=["pool", "hybrid"])
def placed(request: pytest.FixtureRequest) -> Iterator[Service]:
    """A codec replica and a talker, which speak the embedded voice: all calls of a socket meet in the same replicas."""
    app = variant(config(Path("embedded"), talkers=1, codecs=1), 0)
    codec = app.codec.model_copy(update={"placement": request.param})
    with serving(app.model_copy(update={"codec": codec})) as service:
        yield service


class Siblings:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self.num_bytes = Counter[str]()
        self.over: set[str] = set()
        self._told = asyncio.Event()

    async def read(self) -> None:
        while True:
            message = await self._socket.receive_json()
            assert "error" not in message, message
            if message.get("isFinal"):
                self.over.add(message["contextId"])
            else:
                self.num_bytes[message["contextId"]] += len(base64.b64decode(message["audio"]))
            self._told.set()

    async def until(self, is_there: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not is_there():
                self._told.clear()
                await self._told.wait()

    async def write(self, name: str) -> None:
        """A long text, as a language model writes, to its end."""
        for word in SIBLINGS_WORDS:
            await self._socket.send_json({"text": f"{word} ", "context_id": name})
            await asyncio.sleep(WORD_S)
        await self._socket.send_json({"text": "", "flush": True, "context_id": name})
        await self._socket.send_json({"close_context": True, "context_id": name})
        await self.until(lambda: name in self.over)

    async def cancel(self, names: list[str]) -> None:
        """Contexts that are being spoken, all at once."""
        for name in names:
            await self._socket.send_json({"text": " ".join(WORDS), "flush": True, "context_id": name})
        await self.until(lambda: {*names} <= {*self.num_bytes})
        for name in names:
            await self._socket.send_json({"close_context": True, "context_id": name})
        await self.until(lambda: {*names} <= self.over)


async def test_contexts_that_are_cancelled_cost_their_siblings_nothing(placed: Service) -> None:
    http = aiohttp.ClientSession(placed.url, timeout=aiohttp.ClientTimeout(total=None, sock_read=60))
    async with http, http.ws_connect(Contexts.path) as socket:
        siblings = Siblings(socket)
        reading = asyncio.create_task(siblings.read())
        await siblings.write("alone")
        names = [f"sibling-{number}" for number in range(3)]
        writing = [asyncio.create_task(siblings.write(name)) for name in names]
        await siblings.until(lambda: {*names} <= {*siblings.num_bytes})
        num_cancelled = 0
        while num_cancelled < CANCELLED:
            assert not all(task.done() for task in writing), f"only {num_cancelled} were cancelled in the meantime"
            await siblings.cancel([f"cancelled-{num_cancelled + number}" for number in range(BURST)])
            num_cancelled += BURST
        await asyncio.gather(*writing)
        reading.cancel()
        heard_s = {name: siblings.num_bytes[name] / BYTES_PER_S for name in ("alone", *names)}
        print(f"{num_cancelled} cancelled; seconds of audio {heard_s}; went on after one: {await moves(http)}")
        assert all(heard_s[name] > 0.8 * heard_s["alone"] for name in names)
        assert await moves(http) > 0, "Serve cancelled none of the siblings' calls"


async def moves(http: aiohttp.ClientSession) -> float:
    """Streams that went on elsewhere, as the metrics have them some seconds later."""
    await asyncio.sleep(EXPORTED_S)
    async with http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("ray_talkray_failovers"))
