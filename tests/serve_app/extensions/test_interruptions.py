"""Twenty interruptions at random places, on plain sockets: the word named is the last one heard or the one being said.

Flux and our own socket name it. To the others the client knows it from the times that came.
"""

import asyncio
import random
import socket
from bisect import bisect_right
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import pytest
import uvicorn

from deployments.protocol import ModelInfo, PcmChunk, Reading
from serve_app.api.bounded_websocket import BoundedWebSocket
from serve_app.config import ApiSettings
from serve_app.extensions.live.live_text import LiveTexts
from serve_app.speech.utterance_synthesizer import Synthesizer
from tests.serve_app.extensions.timed import Interrupter
from tests.serve_app.fake import CUSTOM_VOICE, FOLLOWED, FakeSynthesizer, utterance
from tests.serve_app.one_model import one_api
from tools.suites.row import SocketRow
from tools.suites.rows import SOCKETS

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


@asynccontextmanager
async def serving(synthesizer: Synthesizer, **config: Any) -> AsyncIterator[str]:
    """The URL of its server, which uvicorn runs with this `config`."""
    texts = LiveTexts()
    api = one_api(synthesizer, ApiSettings(), opened={"live": texts})
    ws: Any = partial(BoundedWebSocket, trusted_proxies=1)
    server = uvicorn.Server(uvicorn.Config(api, log_level="error", ws=ws, lifespan="off", **config))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        task = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
            await texts.aclose()


ROWS = {name: row for name, row in SOCKETS.items() if row.times.in_field and row.stop}


@pytest.mark.parametrize("info", [FOLLOWED, CUSTOM_VOICE], ids=["exact", "estimated"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
async def test_the_word_named_is_the_last_one_heard_or_the_one_being_said(row: SocketRow, info: ModelInfo) -> None:
    chance, synthesizer = random.Random(SEED), FakeSynthesizer(info)
    wrong, words = [], set()
    async with serving(synthesizer) as url, aiohttp.ClientSession() as session, asyncio.timeout(4 * BOUND_S):
        connection = await session.ws_connect(url + row.path)
        listener = Interrupter(connection, row)
        for _ in range(INTERRUPTIONS):
            at_ms = chance.randint(1, (NUM_FRAMES - 1) * FRAME_MS)
            num_frames = min(NUM_FRAMES, at_ms // FRAME_MS + 1 + chance.randint(0, 20))
            synthesizer.script = [*speech(num_frames), asyncio.Event()]
            told = await listener.interrupt(TEXT, row.speak_timed(TEXT), at_ms)
            number = bisect_right(BEGINS_MS, at_ms) - 1
            right = [WORDS[number], WORDS[number - 1] if number else None]
            if told.named not in right:
                wrong.append((at_ms, told.named, right))
            if told.named is not None:
                assert told.mark is (None if info.word_times else True), told
            words.add(told.named)
            async with asyncio.timeout(BOUND_S):
                if row.stop.answer is None:  # what is on its way is of the same context
                    await connection.close()
                await synthesizer.closed.wait()
            if row.stop.answer is None:
                connection = await session.ws_connect(url + row.path)
                listener = Interrupter(connection, row)
        await connection.close()
    assert wrong == []
    assert len(words) > INTERRUPTIONS // 2
