"""Twenty interruptions at random places: how soon there is silence, and whether what had been spoken is right.

By Flux with a text that is written meanwhile, and by every dialect with word times.
"""

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from talkray_tools.recogniser import Recogniser
from tests.clients.interruptions import (
    INTERRUPTIONS,
    NO_FIGURES,
    PLACES_S,
    ROWS,
    SEED,
    VOICE,
    Came,
    interruptions,
    kept,
)
from tests.clients.test_clients import off_by

WORDS_PER_S = 30
RATE = 24000
QUIET_S = 0.5  # of listening behind the answer to an interrupt


@dataclass
class Interrupted:
    """What came of one: `pcm` ends where the listener had come."""

    text: str
    played_s: float
    pcm: bytes
    silence_s: float  # from the interrupt to the last audio that came
    text_spoken: str
    text_remaining: str


class Listener:
    """Plays audio from its first byte on, and notes when each part came."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self.pcm = bytearray()
        self.began_s = self.last_s = 0.0  # of the first and of the last audio

    async def listen(self) -> dict[str, str] | None:
        """What comes within a few milliseconds: a message is returned."""
        try:
            message = await self._socket.receive(timeout=0.005)
        except TimeoutError:
            return None
        if message.type is not aiohttp.WSMsgType.BINARY:
            fields: dict[str, str] = json.loads(message.data)
            assert fields["type"] not in ("Error", "Warning"), fields
            return fields
        self.last_s = time.perf_counter()
        self.began_s = self.began_s or self.last_s
        self.pcm += message.data
        return None

    def has_played(self, played_s: float) -> bool:
        is_there = len(self.pcm) / 2 / RATE >= played_s
        return is_there and time.perf_counter() >= self.began_s + played_s


async def interrupt(
    socket: aiohttp.ClientWebSocketResponse, text: str, *, played_s: float, before_s: float
) -> Interrupted:
    """Writes a text as a language model does, and interrupts it when so much of its audio has been played."""
    written: list[str] = []
    writing, listener = asyncio.create_task(_write(socket, text, written)), Listener(socket)
    async with asyncio.timeout(120):
        while not listener.has_played(played_s):
            await listener.listen()
        offset = {"type": "time_ms", "value": round(1000 * (before_s + played_s))}
        writing.cancel()  # an agent that is interrupted writes no further
        await asyncio.wait((writing,))
        sent_s = time.perf_counter()
        await socket.send_json({"type": "Interrupt", "playback_offset": offset})
        told = None
        while told is None or told["type"] != "SpeechInterrupted":
            told = await listener.listen() or told
        until_s = time.perf_counter() + QUIET_S
        while time.perf_counter() < until_s:
            await listener.listen()
    heard = bytes(listener.pcm[: 2 * int(played_s * RATE)])
    silence_s = max(0.0, listener.last_s - sent_s)
    return Interrupted("".join(written), played_s, heard, silence_s, told["text_spoken"], told["text_remaining"])


async def _write(socket: aiohttp.ClientWebSocketResponse, text: str, written: list[str]) -> None:
    for number, word in enumerate(text.split(" ")):
        await asyncio.sleep(1 / WORDS_PER_S)
        written.append(f" {word}" if number else word)
        await socket.send_json({"type": "Speak", "text": written[-1]})
    await socket.send_json({"type": "Flush"})


async def all_interruptions(url: str) -> list[Interrupted]:
    generator = random.Random(SEED)
    path = f"{url.replace('http', 'ws', 1)}/v2/speak?model=flux-{VOICE}-en&encoding=linear16&sample_rate={RATE}"
    came: list[Interrupted] = []
    async with aiohttp.ClientSession() as session, session.ws_connect(path) as socket:
        assert json.loads(await socket.receive_str(timeout=60))["type"] == "Connected"
        for number in range(INTERRUPTIONS):
            text = " ".join(generator.sample(NO_FIGURES, 4))
            before_s = sum(one.played_s for one in came)
            played_s = round(generator.uniform(*PLACES_S), 3)
            came.append(await interrupt(socket, text, played_s=played_s, before_s=before_s))
            print(f"interruption {number + 1} of {INTERRUPTIONS} after {played_s:.1f} s", flush=True)
    return came


def test_an_interruption_is_silence_at_once_and_what_was_said_is_right(server: str, ears: Sequence[Recogniser]) -> None:
    came, found = asyncio.run(all_interruptions(server)), []
    for one in came:
        assert one.text_spoken + one.text_remaining == one.text
        audio = np.frombuffer(one.pcm, "<i2").astype(np.float32) / 32768
        found.append(off_by(one.text_spoken.split(), one.text, audio, RATE, ears))
    silences_ms = [1000 * one.silence_s for one in came]
    print(
        f"\n| {INTERRUPTIONS} | {statistics.median(silences_ms):.0f} / {max(silences_ms):.0f} ms "
        f"| {found.count(0)} the same, {sum(abs(words) == 1 for words in found)} off by one word |"
    )
    assert max(silences_ms) < 1000
    assert all(abs(words) <= 1 for words in found), found


@pytest.fixture
def came(request: pytest.FixtureRequest, name: str) -> Came:
    """Of the dialect `name`. TALKRAY_CLIENTS_HEARD names a folder of interruptions that were made elsewhere."""
    if folder := os.environ.get("TALKRAY_CLIENTS_HEARD"):
        return kept(Path(folder) / f"{name}.npz")
    return asyncio.run(interruptions(ROWS[name], request.getfixturevalue("server")))


@pytest.mark.parametrize("name", ROWS)
def test_the_word_named_is_the_last_heard_or_being_said(came: Came, ears: Sequence[Recogniser], name: str) -> None:
    assert len(came) == INTERRUPTIONS
    assert all(told.mark is None for _, told in came), "times of the embedded voice are exact"
    pcm = [np.frombuffer(told.pcm, "<i2").astype(np.float32) / 32768 for _, told in came]
    found = [off_by(told.spoken, text, audio, RATE, ears) for (text, told), audio in zip(came, pcm, strict=True)]
    print(f"\n| {name} | {found.count(0)} the same, {sum(abs(words) == 1 for words in found)} off by one word |")
    assert all(abs(words) <= 1 for words in found), found
