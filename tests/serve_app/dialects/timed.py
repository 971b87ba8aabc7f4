"""The words in the answers of any dialect, with their times."""

from dataclasses import dataclass, field
from typing import Literal

from tests.serve_app.dialects.client import Json, audio_in

Timed = tuple[str, float, float]  # a word, and the milliseconds of the audio at which it begins and ends
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
