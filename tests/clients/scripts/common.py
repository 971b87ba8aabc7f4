"""What every client's script does: speak the turns, interrupt some, write down what came. Standard library only."""

import asyncio
import json
import math
import random
import sys
import time
import wave
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

Pcm = AsyncIterator[tuple[bytes, int]]  # s16le mono, and its rate


class Order:
    def __init__(self) -> None:
        fields = json.loads(Path(sys.argv[1]).read_text())
        self.url: str = fields["url"]
        self.service: str = fields["service"]
        self.voice: str = fields["voice"]
        self.texts: list[str] = fields["texts"]
        self.interruptions: int = fields["interruptions"]
        self.python: str = fields["python"]
        self.language_model: str = fields.get("language_model", "")
        self.folder = Path(fields["folder"])


class Report:
    def __init__(self, order: Order, versions: dict[str, str]) -> None:
        self._order = order
        self._fields: dict[str, object] = {"versions": versions}
        self._turns: list[dict[str, object]] = []
        self._interrupted: list[dict[str, object]] = []

    def turn(
        self, text: str, pcm: bytes, rate: int, *, first_audio_s: float | None, words: list[str] | None = None
    ) -> None:
        file = self._written(f"turn-{len(self._turns)}.wav", pcm, rate)
        turn = {"text": text, "file": file, "first_audio_s": first_audio_s, "words": words}
        self._turns.append(turn)
        first_s = math.nan if first_audio_s is None else first_audio_s
        print(f"turn {len(self._turns)}: {len(pcm) / 2 / rate:.1f} s, first audio after {first_s:.2f} s", flush=True)

    def interruption(self, text: str, pcm: bytes, rate: int, words: list[str] | None, *, stalled_s: float) -> None:
        file = self._written(f"interruption-{len(self._interrupted)}.wav", pcm, rate)
        self._interrupted.append({"text": text, "file": file, "words": words, "stalled_s": stalled_s})
        print(f"interruption {len(self._interrupted)} after {len(pcm) / 2 / rate:.1f} s", flush=True)

    def _written(self, name: str, pcm: bytes, rate: int) -> str:
        write_wav(self._order.folder / name, pcm, rate)
        return name

    def write(self) -> None:
        self._fields |= {"turns": self._turns, "interruptions": self._interrupted}
        (self._order.folder / "report.json").write_text(json.dumps(self._fields))


def write_wav(file: Path, pcm: bytes, rate: int) -> None:
    with wave.open(str(file), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(pcm)


async def until(condition: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)
    print(what, flush=True)


async def converse(
    order: Order, report: Report, speak: Callable[[str], Pcm], *,
    words: Callable[[], list[str] | None] = lambda: None, words_by: Callable[[float], list[str]] | None = None,
    stalled_s: Callable[[], float] = lambda: 0.0, ahead_s: float = 0.0,
    before_leaving: Callable[[], Awaitable[None]] | None = None,
) -> None:  # fmt: skip
    """All turns one after the other. An interruption is a turn whose audio is left after its first 0.3 s, and is
    followed by a whole turn, so that what is left of it would be heard there. With `words_by`, which tells the words
    that begin within some seconds of audio, it is left at a random place. `stalled_s`: how late the turn is by then.
    `ahead_s`: of audio that the client takes before it is played.
    """
    chance = random.Random(17)
    for index, text in enumerate(order.texts):
        if index < order.interruptions:
            story = order.texts[-1 - index] + " " + text
            at_s = 0.3 if words_by is None else chance.uniform(0.4, 4)
            pcm, rate = await _interrupted(speak(story), at_s, ahead_s=ahead_s)
            named = None if words_by is None else words_by(len(pcm) / 2 / rate)
            report.interruption(story, pcm, rate, named, stalled_s=stalled_s())
        began_s, first_audio_s, audio, rate = time.perf_counter(), None, bytearray(), 24000
        async with asyncio.timeout(120):
            async for pcm, rate in speak(text):  # noqa: B007, the last one is written
                if first_audio_s is None and pcm:
                    first_audio_s = round(time.perf_counter() - began_s, 4)
                audio += pcm
        report.turn(text, bytes(audio), rate, first_audio_s=first_audio_s, words=words())
    if before_leaving is not None:
        await before_leaving()
    report.write()


async def _interrupted(audio: Pcm, at_s: float, *, ahead_s: float) -> tuple[bytes, int]:
    """What was heard by then, and its rate. The client has read `ahead_s` more of it."""
    heard, rate = b"", 24000
    async with asyncio.timeout(120):
        async for pcm, rate in audio:
            heard += pcm
            if len(heard) / 2 / rate > at_s + ahead_s:
                break
        await audio.aclose()  # type: ignore[attr-defined]
    return heard[: 2 * int(at_s * rate)], rate


def pieces(text: str) -> list[str]:
    """As a language model writes: a word with the space before it."""
    first, *rest = text.split(" ")
    return [first, *(f" {word}" for word in rest)]
