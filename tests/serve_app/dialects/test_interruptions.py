"""Twenty interruptions at random places, on plain sockets: the word named is the last one heard or the one being said.

Flux and our own socket name it. To the others the client knows it from the times that came.
"""

import asyncio
import json
import random
import socket
from bisect import bisect_right
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import aiohttp
import pytest
import uvicorn

from deployments.protocol import ModelInfo, PcmChunk, Reading
from serve_app.api.bounded_websocket import BoundedWebSocket
from serve_app.config import ApiSettings
from serve_app.speech.live_text import LiveTexts
from tests.serve_app.dialects.client import Json, audio_in
from tests.serve_app.dialects.rows import SOCKETS, SocketRow
from tests.serve_app.dialects.timed import Reader
from tests.serve_app.fake import CUSTOM_VOICE, FOLLOWED, FakeSynthesizer, utterance
from tests.serve_app.one_model import one_api

pytestmark = pytest.mark.anyio

INTERRUPTIONS, SEED, BOUND_S = 20, 17, 30.0
TEXT = (
    "the old harbour master walked slowly along a wet stone pier and counted every boat that had come home before "
    "night fell over his small town while gulls cried above him"
)
WORDS = TEXT.split()
FRAME_MS, FRAME_CHARS = 80, 2.0
NUM_FRAMES = int(len(TEXT) / FRAME_CHARS)
PLACES = [len(" ".join([*WORDS[:number], ""])) for number in range(len(WORDS))]
# The middle of a frame is as far as its reading.
BEGINS_MS = [0.0, *(FRAME_MS * (place / FRAME_CHARS + 0.5) for place in PLACES[1:])]


def speech(num_frames: int) -> list[PcmChunk]:
    """The first frames of the text, which do not come to its end."""
    frames, size = utterance(num_frames)[:-1], CUSTOM_VOICE.frame_samples
    return [
        replace(frame, readings=(Reading(number, (FRAME_CHARS * number,)),), position=(number + 1) * size)
        for number, frame in enumerate(frames)
    ]


@dataclass
class Interrupted:
    """`named` is None before the first word."""

    named: str | None
    answer: Json | None
    mark: object  # `estimated`


class Listener:
    """Has the server speak the text, and interrupts it where its audio has come to a place."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, row: SocketRow) -> None:
        self._socket, self._row = socket, row
        self._before_ms = 0  # of the session: where it was interrupted last

    async def interrupt(self, at_ms: int) -> Interrupted:
        for message in self._row.speak_timed(TEXT):
            await self._socket.send_json(message)
        names = self._row.words == "text_spoken" or self._row is SOCKETS["native"]
        reader = Reader("" if self._row.words == "text_spoken" else self._row.words, self._row.clock)
        heard_ms = 0.0
        while heard_ms < at_ms:
            message = await self._next()
            heard_ms += len(message if isinstance(message, bytes) else audio_in(message)) / 48
            if isinstance(message, dict):
                reader.read(message)
        assert self._row.cancel is not None
        await self._socket.send_json(self._row.cancel | self._where(at_ms))
        answer = None if self._row.cancelled is None else await self._answer(reader)
        if names:
            assert answer is not None
            assert answer["text_spoken"] + answer["text_remaining"] == TEXT
            assert answer["text_spoken"].split()[-1:] == ([answer["last_word"]] if answer["last_word"] else [])
            return Interrupted(answer["last_word"], answer, answer.get("estimated"))
        known = [word for word, begin_ms, _ in reader.words if begin_ms <= at_ms]
        assert len(reader.marks) <= 1
        return Interrupted(known[-1] if known else None, answer, next(iter(reader.marks), None))

    def _where(self, at_ms: int) -> Json:
        if self._row is SOCKETS["native"]:
            return {"played_ms": at_ms}
        if self._row is SOCKETS["flux"]:
            self._before_ms += at_ms
            return {"playback_offset": {"type": "time_ms", "value": self._before_ms}}
        return {}

    async def _answer(self, reader: Reader) -> Json:
        """The answer to the interruption, behind what was on its way. What words come by then, the client knows."""
        assert self._row.cancelled is not None
        while True:
            message = await self._next()
            if isinstance(message, dict) and message.items() >= self._row.cancelled.items():
                return message
            if isinstance(message, dict):
                reader.read(message)

    async def _next(self) -> Json | bytes:
        message = await self._socket.receive(timeout=BOUND_S)
        if message.type is aiohttp.WSMsgType.BINARY:
            audio: bytes = message.data
            return audio
        assert message.type is aiohttp.WSMsgType.TEXT, message
        told: Json = json.loads(message.data)
        assert told.get("type") not in ("error", "Error", "Warning"), told
        return told


@asynccontextmanager
async def serving(synthesizer: FakeSynthesizer) -> AsyncIterator[str]:
    texts = LiveTexts()
    api = one_api(synthesizer, ApiSettings(), live_texts=texts)
    server = uvicorn.Server(uvicorn.Config(api, log_level="error", ws=BoundedWebSocket, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        task = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
            await texts.aclose()


ROWS = {name: row for name, row in SOCKETS.items() if row.words and row.cancel}


def test_these_dialects_can_be_interrupted() -> None:
    assert set(ROWS) == {"native", "flux", "elevenlabs", "elevenlabs-dialogue", "cartesia"}


@pytest.mark.parametrize("info", [FOLLOWED, CUSTOM_VOICE], ids=["exact", "estimated"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
async def test_the_word_named_is_the_last_one_heard_or_the_one_being_said(row: SocketRow, info: ModelInfo) -> None:
    chance, synthesizer = random.Random(SEED), FakeSynthesizer(info)
    wrong, words = [], set()
    async with serving(synthesizer) as url, aiohttp.ClientSession() as session, asyncio.timeout(4 * BOUND_S):
        connection = await session.ws_connect(url + row.path)
        listener = Listener(connection, row)
        for _ in range(INTERRUPTIONS):
            at_ms = chance.randint(1, (NUM_FRAMES - 1) * FRAME_MS)
            num_frames = min(NUM_FRAMES, at_ms // FRAME_MS + 1 + chance.randint(0, 20))
            synthesizer.script = [*speech(num_frames), asyncio.Event()]
            told = await listener.interrupt(at_ms)
            number = bisect_right(BEGINS_MS, at_ms) - 1
            right = [WORDS[number], WORDS[number - 1] if number else None]
            if told.named not in right:
                wrong.append((at_ms, told, right))
            if told.named is not None:
                assert told.mark is (None if info.word_times else True), told
            words.add(told.named)
            async with asyncio.timeout(BOUND_S):
                if row.cancelled is None:  # what is on its way is of the same context
                    await connection.close()
                await synthesizer.closed.wait()
            if row.cancelled is None:
                connection = await session.ws_connect(url + row.path)
                listener = Listener(connection, row)
        await connection.close()
    assert wrong == []
    assert len(words) > INTERRUPTIONS // 2
