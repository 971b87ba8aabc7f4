"""While others listen, a change of style in a text is heard as a pause no longer than that between two sentences."""

import asyncio
import base64
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import numpy as np

from tests.clients.test_clients import VOICE
from tests.clients.texts import TEXTS

RATE = 24000
SENTENCES = [text for text in TEXTS if sum(map(text.count, ".?,")) == 1]
STYLES = ("slow", "quiet", "fast", "neutral", "quiet", "slow")
TURNS = 5  # of each way, so that there are 50 changes
LISTENERS = int(os.environ.get("TALKRAY_CLIENTS_LISTENERS", "4"))
Part = tuple[float, bytes, list[tuple[float, float]]]  # when it came; audio; begin and end of words


async def over_http(http: aiohttp.ClientSession, text: str) -> AsyncIterator[Part]:
    asked = {"input": text, "voice": VOICE, "response_format": "pcm", "stream_format": "sse", "word_timestamps": True}
    async with http.post("/v1/audio/speech", json=asked) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            event = json.loads(line[5:]) if line.startswith(b"data:") else {}
            words = [(word["start"], word["end"]) for word in event.get("words", ())]
            yield time.perf_counter(), base64.b64decode(event.get("audio", "")), words


async def live(http: aiohttp.ClientSession, text: str) -> AsyncIterator[Part]:
    """As a language model writes, over Cartesia's socket."""
    encoded = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": RATE}
    asked: dict[str, Any] = {"model_id": "sonic-3", "voice": {"mode": "id", "id": VOICE}, "output_format": encoded}
    asked |= {"context_id": "live", "language": "en", "add_timestamps": True}

    async def write(socket: aiohttp.ClientWebSocketResponse) -> None:
        for word in text.split(" "):
            await socket.send_json({**asked, "transcript": f"{word} ", "continue": True})
            await asyncio.sleep(1 / 30)
        await socket.send_json({**asked, "transcript": "", "continue": False})

    async with http.ws_connect("/tts/websocket?cartesia_version=2025-04-16&api_key=none") as socket:
        writing = asyncio.create_task(write(socket))
        while (event := await socket.receive_json())["type"] != "done":
            assert event["type"] != "error", event
            words = event.get("word_timestamps", {"start": (), "end": ()})
            times = list(zip(words["start"], words["end"], strict=True))
            yield time.perf_counter(), base64.b64decode(event.get("data", "")), times
        await writing


async def pauses(parts: AsyncIterator[Part], sentences: Sequence[str]) -> list[tuple[float, float]]:
    """For each border of sentences the seconds of quiet in the audio, and by how much audio came late there."""
    pcm, words, late, stalled_s, began_s = b"", list[tuple[float, float]](), list[tuple[float, float]](), 0.0, None
    async for came_s, audio, times in parts:
        words += times
        began_s = came_s if began_s is None and audio else began_s
        if audio and began_s is not None:
            played_s = len(pcm) / 2 / RATE
            if (late_s := came_s - began_s - played_s - stalled_s) > 0:
                late.append((played_s, late_s))
                stalled_s += late_s
            pcm += audio
    step = RATE // 100
    samples = np.frombuffer(pcm, "<i2")[: len(pcm) // 2 // step * step].astype(float)
    levels = np.sqrt(np.square(samples.reshape(-1, step)).mean(axis=1))
    borders = [0, *itertools.accumulate(len(sentence.split()) for sentence in sentences)]
    found = []
    for first, border, end in zip(borders, borders[1:], borders[2:], strict=False):
        near = int(100 * words[border - 1][1]) - 20, int(100 * words[border][0]) + 20
        middle = near[0] + int(np.convolve(levels[slice(*near)], np.ones(5), "same").argmin())
        before, after = levels[int(100 * words[first][0]) : middle], levels[middle : int(100 * words[end - 1][1])]
        begin = middle - int((before > 0.01 * before.max())[::-1].argmax())  # quiet as compared with its sentence
        until = middle + int((after > 0.01 * after.max()).argmax())
        late_s = sum(each for at_s, each in late if begin / 100 - 0.1 <= at_s <= until / 100 + 0.1)
        found.append(((until - begin) / 100, late_s))
    return found


@asynccontextmanager
async def listener(http: aiohttp.ClientSession, number: int) -> AsyncIterator[None]:
    """One who listens to one text after the other, in real time."""

    async def listen() -> None:
        for text in itertools.cycle(TEXTS[number:]):
            asked = {"input": text, "voice": "felix", "response_format": "pcm"}
            async with http.post("/v1/audio/speech", json=asked) as answer:
                began_s = time.perf_counter()
                length_s = len(await answer.read()) / 2 / RATE
            await asyncio.sleep(max(0.0, began_s + length_s - time.perf_counter()))

    task = asyncio.create_task(listen())
    yield
    task.cancel()
    await asyncio.wait((task,))


async def measured(url: str, speak: Callable[..., AsyncIterator[Part]]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {"changes": [], "breaks": []}
    async with aiohttp.ClientSession(url) as http, AsyncExitStack() as others:
        for number in range(LISTENERS):
            await others.enter_async_context(listener(http, number))
        for turn in range(TURNS):
            sentences = [SENTENCES[(turn + n) % len(SENTENCES)] for n in range(len(STYLES))]
            pairs = zip(STYLES, sentences, strict=True)
            tagged = " ".join(f'<emotion value="{style}"/> {text}' for style, text in pairs)
            found["changes"] += await pauses(speak(http, tagged), sentences)
            found["breaks"] += await pauses(speak(http, " ".join(sentences)), sentences)
    return found


def test_a_change_of_style_is_a_pause_no_longer_than_a_break(server: str) -> None:
    both = [asyncio.run(measured(server, speak)) for speak in (over_http, live)]
    heard = {}
    for name in ("changes", "breaks"):
        quiet_ms, late_ms = 1000 * np.array([each for found in both for each in found[name]]).T
        heard[name] = quiet_ms + late_ms
        rows = [np.quantile(each, (0.5, 0.9, 1)).round().astype(int).tolist() for each in (quiet_ms, late_ms)]
        print(f"{len(quiet_ms)} {name}, {LISTENERS} others: quiet {rows[0]}, late {rows[1]} ms (p50, p90, max)")
    print(f"load average {os.getloadavg()[0]:.1f}")
    for share in (0.5, 0.9, 1):
        assert np.quantile(heard["changes"], share) <= np.quantile(heard["breaks"], share)
