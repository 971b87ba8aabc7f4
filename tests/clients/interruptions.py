"""Twenty interruptions of each dialect with word times, by plain sockets: what is told, and the audio up to there.

A GPU host has no recognisers, so what it told and what was heard can be kept in a folder, and be judged elsewhere:

    python -m tests.clients.interruptions http://127.0.0.1:8000 heard
    TALKRAY_CLIENTS_HEARD=heard make clients    # or the one test of test_interruptions.py
"""

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np

from tests.clients.texts import TEXTS
from tests.serve_app.extensions.client import Json
from tests.serve_app.extensions.timed import Interrupted, Interrupter
from tools.suites.row import VOICE as ROWS_VOICE
from tools.suites.row import SocketRow
from tools.suites.rows import SOCKETS

VOICE = "nora"
INTERRUPTIONS = 20
SEED = 17
PLACES_S = (0.4, 5.0)  # of the audio of a text, after which it is interrupted
NO_FIGURES = [text for text in TEXTS if not any(map(str.isdigit, text))]
ROWS = {name: row for name, row in SOCKETS.items() if row.times.in_field and row.stop}
Came = list[tuple[str, Interrupted]]  # each text, and what an interruption of it told


async def interruptions(row: SocketRow, url: str) -> Came:
    generator, came = random.Random(SEED), Came()
    path = url.replace("http", "ws", 1) + row.path.replace(ROWS_VOICE, VOICE)
    async with aiohttp.ClientSession() as session:
        socket = await session.ws_connect(path)
        interrupter = Interrupter(socket, row)
        for number in range(INTERRUPTIONS):
            text = " ".join(generator.sample(NO_FIGURES, 4))
            messages: list[Json] = json.loads(
                json.dumps(row.speak_timed(text)).replace(f'"{ROWS_VOICE}"', f'"{VOICE}"')
            )
            at_ms = round(1000 * generator.uniform(*PLACES_S))
            came.append((text, await interrupter.interrupt(text, messages, at_ms)))
            print(f"interruption {number + 1} of {INTERRUPTIONS} after {at_ms} ms", flush=True)
            if row.stop.answer is None:  # nothing says where audio of the interrupted text ends
                await socket.close()
                socket = await session.ws_connect(path)
                interrupter = Interrupter(socket, row)
        await socket.close()
    return came


def keep(came: Came, file: Path) -> None:
    told = [{"text": text, "spoken": each.spoken, "mark": each.mark} for text, each in came]
    audio = {f"pcm-{number}": np.frombuffer(each.pcm, "<i2") for number, (_, each) in enumerate(came)}
    np.savez_compressed(file, told=json.dumps(told), **audio)  # type: ignore[arg-type]


def kept(file: Path) -> Came:
    def entries() -> Iterator[tuple[str, Interrupted]]:
        with np.load(file) as found:
            for number, one in enumerate(json.loads(str(found["told"]))):
                yield one["text"], Interrupted(one["spoken"], one["mark"], found[f"pcm-{number}"].tobytes())

    return list(entries())


def main(url: str, folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, row in ROWS.items():
        print(name, flush=True)
        keep(asyncio.run(interruptions(row, url)), Path(folder) / f"{name}.npz")


if __name__ == "__main__":
    main(*sys.argv[1:])
