"""The words in the answers of any dialect with their times, and what a plain socket says of them at an interruption."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import aiohttp

from tests.serve_app.extensions.client import Json, audio_in
from tools.suites.row import SocketRow
from tools.suites.rows import SOCKETS

Timed = tuple[str, float, float]  # a word, and the milliseconds of the audio at which it begins and ends
_BOUND_S = 120.0  # for a message to come
_CHARS = ("characters", "chars")
_BEGINS = {"character_start_times_seconds": 1000, "charStartTimesMs": 1, "char_start_times_ms": 1}
_ENDS = {"character_end_times_seconds": 1000}
_LENGTHS = ("charDurationsMs", "char_durations_ms")


@dataclass
class Reader:
    """Reads the messages of one text: the field that carries words, and from where its times count."""

    carried_by: str
    clock: Literal["beginning", "words", "audio"] = "beginning"
    words: list[Timed] = field(default_factory=list)
    marks: set[object] = field(default_factory=set)  # `estimated` of messages with words; None where there is none
    _clock_ms: float = 0.0

    def read(self, message: Json) -> None:
        if carried := message.get(self.carried_by):
            words = list(zip(*_entries(carried), strict=True))
            self.marks |= {message.get("estimated")} if words else set()
            self.words += [(word, begin + self._clock_ms, end + self._clock_ms) for word, begin, end in words]
            if self.clock == "words":
                self._clock_ms += words[-1][2]
        else:
            assert "estimated" not in message, message
        if self.clock == "audio":
            self._clock_ms += len(audio_in(message)) / 48


def _entries(carried: object) -> tuple[list[str], list[float], list[float]]:
    if isinstance(carried, list):
        begin, end = ("start_time", "end_time") if carried and "start_time" in carried[0] else ("start", "end")
        spoken = [each["word"] for each in carried]
        return spoken, [1000 * each[begin] for each in carried], [1000 * each[end] for each in carried]
    assert isinstance(carried, dict)
    if "words" in carried:
        begins, ends = ([1000 * second for second in carried[name]] for name in ("start", "end"))
        return carried["words"], begins, ends
    return _of_characters(carried)


def _of_characters(carried: Json) -> tuple[list[str], list[float], list[float]]:
    chars = next(carried[name] for name in _CHARS if name in carried)
    begins = next([unit * each for each in carried[name]] for name, unit in _BEGINS.items() if name in carried)
    lengths = next((carried[name] for name in _LENGTHS if name in carried), None)
    if lengths is None:
        ends = next([unit * each for each in carried[name]] for name, unit in _ENDS.items() if name in carried)
    else:
        ends = [begin + length for begin, length in zip(begins, lengths, strict=True)]
    assert chars[-1] == " "
    spaces = [place for place, char in enumerate(chars) if char == " "]
    firsts = [0, *(place + 1 for place in spaces[:-1])]
    return "".join(chars).split(), [begins[first] for first in firsts], [ends[place - 1] for place in spaces]


@dataclass
class Interrupted:
    """What a client knows of an utterance that it has interrupted."""

    spoken: list[str]  # the words that were heard, the last one perhaps in part
    mark: object  # `estimated`
    pcm: bytes  # what was heard

    @property
    def named(self) -> str | None:
        return self.spoken[-1] if self.spoken else None


class Interrupter:
    """Has a server speak texts over one socket, and interrupts each where its audio has come to a place."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, row: SocketRow) -> None:
        self._socket, self._row = socket, row
        self._before_ms = 0  # of the session: where it was interrupted last

    async def interrupt(self, text: str, messages: Sequence[Json], at_ms: int) -> Interrupted:
        for message in messages:
            await self._socket.send_json(message)
        names = self._row.times.in_field == "text_spoken" or self._row is SOCKETS.get("native")
        reader = Reader(
            "" if self._row.times.in_field == "text_spoken" else self._row.times.in_field, self._row.times.counts_from
        )
        pcm = bytearray()
        while len(pcm) < 48 * at_ms:
            told = await self._next()
            pcm += told if isinstance(told, bytes) else audio_in(told)
            if isinstance(told, dict):
                reader.read(told)
        assert self._row.stop is not None
        await self._socket.send_json(self._row.stop.message | self._where(at_ms))
        answer = None if self._row.stop.answer is None else await self._answer(reader)
        heard = bytes(pcm[: 48 * at_ms])
        if names:
            assert answer is not None
            assert answer["text_spoken"] + answer["text_remaining"] == text
            spoken = answer["text_spoken"].split()
            assert spoken[-1:] == ([answer["last_word"]] if answer["last_word"] else [])
            return Interrupted(spoken, answer.get("estimated"), heard)
        assert len(reader.marks) <= 1
        spoken = [word for word, begin_ms, _ in reader.words if begin_ms <= at_ms]
        return Interrupted(spoken, next(iter(reader.marks), None), heard)

    def _where(self, at_ms: int) -> Json:
        if self._row is SOCKETS.get("native"):
            return {"played_ms": at_ms}
        if self._row is SOCKETS.get("flux"):
            self._before_ms += at_ms
            return {"playback_offset": {"type": "time_ms", "value": self._before_ms}}
        return {}

    async def _answer(self, reader: Reader) -> Json:
        """The answer to the interruption, behind what was on its way. What words come by then, the client knows."""
        assert self._row.stop is not None
        assert self._row.stop.answer is not None
        while True:
            told = await self._next()
            if isinstance(told, dict) and told.items() >= self._row.stop.answer.items():
                return told
            if isinstance(told, dict):
                reader.read(told)

    async def _next(self) -> Json | bytes:
        message = await self._socket.receive(timeout=_BOUND_S)
        if message.type is aiohttp.WSMsgType.BINARY:
            audio: bytes = message.data
            return audio
        assert message.type is aiohttp.WSMsgType.TEXT, message
        told: Json = json.loads(message.data)
        assert told.get("type") not in ("error", "Error", "Warning"), told
        return told
