"""The test bed of endings: scripted speech, what may come after and within it, and what the guard makes of it."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import numpy as np
import pytest

from deployments.protocol import Codes, FinishReason, FrameChunk, ModelInfo, ModelKind, Pcm, PcmChunk, SynthesisRequest
from deployments.serving.failover import with_failover
from deployments.serving.replica_streams import TalkerAudio
from deployments.speech_detection import EndingGuard, runaway_frames

pytestmark = pytest.mark.anyio

RATE, SAMPLES, GROUPS, TOKENS = 2400, 192, 2, 20  # frames of 80 ms
LATE = runaway_frames(TOKENS, SAMPLES / RATE) // 2  # frames by which a text is expected to be spoken
SECOND = 12.5  # frames
SPOKEN = round(4.5 * TOKENS)  # frames of plain speech of the text
STOP, LENGTH, EARLY = FinishReason.STOP, FinishReason.LENGTH, FinishReason.EARLY
SILENCE, LOOP = FinishReason.SILENCE, FinishReason.LOOP


class Script:
    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self.codes: Codes = np.zeros((0, GROUPS), np.int16)
        self.pcm: Pcm = np.zeros(0, np.int16)

    @property
    def frames(self) -> int:
        return len(self.codes)

    def _add(self, codes: Codes, pcm: np.ndarray) -> "Script":
        self.codes = np.concatenate([self.codes, codes.astype(np.int16)])
        self.pcm = np.concatenate([self.pcm, pcm.round().clip(-32768, 32767).astype(np.int16)])
        return self

    def _fresh(self, frames: int) -> Codes:
        return self._random.integers(0, 2048, (frames, GROUPS)).astype(np.int16)

    def _noise(self, frames: int, level_db: float) -> np.ndarray:
        return self._random.standard_normal(frames * SAMPLES) * 32768 * 10 ** (level_db / 20)

    def speech(self, frames: int, *, level_db: float = -20.0) -> "Script":
        """Sounds and the gaps between them, some ten decibels apart, four times a second."""
        time_s = np.arange(frames * SAMPLES) / RATE
        envelope_db = 8 * np.sin(2 * np.pi * 4 * time_s) + 4 * np.sin(2 * np.pi * 0.7 * time_s)
        return self._add(self._fresh(frames), self._noise(frames, level_db) * 10 ** (envelope_db / 20))

    def room(self, frames: int, level_db: float) -> "Script":
        """The even noise of a room, or digital silence. Its codes hardly change."""
        codes = np.full((frames, GROUPS), 7) + (self._random.random((frames, GROUPS)) < 0.2)
        return self._add(codes, self._noise(frames, level_db))

    def loop(self, frames: int, *, period: int, odd: float = 0.0) -> "Script":
        """The same `period` frames again and again, all loud; a share of frames is `odd`."""
        codes = np.resize(np.repeat(self._random.permutation(2048)[:period], GROUPS), (frames, GROUPS))
        strays = self._random.random(frames) < odd
        codes[strays] = self._fresh(int(strays.sum()))
        sound = np.resize(self._noise(period, -20.0), frames * SAMPLES)
        levels = np.repeat(np.resize(self._random.uniform(0.2, 2.0, period), frames), SAMPLES)
        return self._add(codes, sound * levels)


def heard(
    script: Script, reason: FinishReason | None = None, *, tokens: int = TOKENS, seed: int = 0
) -> tuple[int, FinishReason | None]:
    """How many frames of a script pass the guard, cut into any chunks, and why they end."""
    guard, cuts, passed = EndingGuard(SAMPLES, RATE), np.random.default_rng(seed), 0
    while passed < script.frames or reason is not None:
        end = min(script.frames, passed + int(cuts.integers(1, 13)))
        pcm = script.pcm[passed * SAMPLES : end * SAMPLES]
        codes, pcm, ended = guard.truncate(
            script.codes[passed:end], pcm, reason if end == script.frames else None, tokens
        )
        assert len(pcm) == len(codes) * SAMPLES
        passed += len(codes)
        if ended is not None:
            return passed, ended
    return passed, None


ENDINGS: dict[str, tuple[Callable[[], Script], FinishReason, FinishReason, float]] = {
    # what is scripted, why the talker ended it, what is told, seconds after the speech that are heard at most
    "speech": (lambda: Script().speech(SPOKEN), STOP, STOP, 0),
    "slow speech": (lambda: Script().speech(2 * LATE - 1), STOP, STOP, 0),
    "speech that max_new_tokens cuts": (lambda: Script().speech(9), LENGTH, LENGTH, 0),
    "speech that ends in a second of silence": (lambda: Script().speech(SPOKEN).room(12, -90), STOP, STOP, 1),
    "digital silence after it": (lambda: Script().speech(SPOKEN).room(999, -200), LENGTH, SILENCE, 8),
    "a quiet room after it": (lambda: Script().speech(SPOKEN).room(999, -60), LENGTH, SILENCE, 8),
    "a noisy room after it": (lambda: Script().speech(SPOKEN).room(999, -38), LENGTH, SILENCE, 8),
    "a quiet room after slow speech": (lambda: Script().speech(LATE + 9).room(999, -60), LENGTH, SILENCE, 3.1),
    "nothing but silence": (lambda: Script().room(999, -70), LENGTH, SILENCE, 8),
    "a buzz": (lambda: Script().speech(SPOKEN).loop(999, period=1), LENGTH, LOOP, 8.1),
    "a syllable": (lambda: Script().speech(SPOKEN).loop(999, period=4), LENGTH, LOOP, 8.4),
    "a word": (lambda: Script().speech(SPOKEN).loop(999, period=13), LENGTH, LOOP, 9.1),
    "a phrase": (lambda: Script().speech(SPOKEN).loop(999, period=40), LENGTH, LOOP, 11.3),
    "a loop with odd frames": (lambda: Script().speech(SPOKEN).loop(999, period=9, odd=0.05), LENGTH, LOOP, 16),
    "a loop from the start": (lambda: Script().loop(999, period=6), LENGTH, LOOP, 8.6),
    "a word and a pause, again and again": (lambda: stutter(9, 6, 99), LENGTH, LOOP, 16),
    "gibberish": (lambda: Script().speech(2 * LATE), FinishReason.RUNAWAY, FinishReason.RUNAWAY, 0),
    "an end after a breath": (lambda: Script().speech(9), STOP, EARLY, 0),
    "an end before a sound": (lambda: Script().room(30, -70), STOP, EARLY, 2.5),
    "an end at once": (Script, STOP, EARLY, 0),
    "a few frames of silence": (lambda: Script().room(5, -200), STOP, EARLY, 1),
}


def stutter(sound: int, pause: int, times: int) -> Script:
    script = Script().speech(SPOKEN)
    word = Script(1).speech(sound)
    for _ in range(times):
        script._add(word.codes, word.pcm).room(pause, -70)
    return script


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize("seed", range(3))
def test_endings(name: str, seed: int) -> None:
    build, reason, reported, most_s = ENDINGS[name]
    script = build()
    silent = name.startswith(("nothing", "a loop from", "an end before", "a few"))
    speech = 0 if silent else script.frames if not most_s else LATE + 9 if "slow" in name else SPOKEN
    passed, ended = heard(script, reason, seed=seed)
    assert ended is reported
    assert speech <= passed <= speech + most_s * SECOND
    if reported in (STOP, LENGTH, EARLY):
        assert passed == script.frames  # nothing of it was cut


PAUSES: dict[str, Callable[[], Script]] = {
    "two seconds after the first word": lambda: Script().speech(9).room(25, -70).speech(SPOKEN),
    "seven seconds in its middle": lambda: Script().speech(SPOKEN // 2).room(87, -200).speech(SPOKEN // 2),
    "a sentence at a time": lambda: pauses(30, 20, 6),
    "late, of slow speech": lambda: Script().speech(LATE).room(36, -70).speech(20),
    "late, in a noisy room": lambda: Script().speech(LATE).room(36, -36).speech(20),
    "whispered to the end": lambda: Script().speech(LATE).speech(60, level_db=-44),
    "a held note": lambda: Script().speech(60).loop(30, period=1).speech(30),
    "no no no no": lambda: Script().speech(20).loop(8 * 6, period=8).speech(20),
    "quiet speech": lambda: Script().speech(SPOKEN, level_db=-44),
    "quiet before it is loud": lambda: Script().speech(LATE, level_db=-42).speech(30, level_db=-16),
}


def pauses(words: int, pause: int, times: int) -> Script:
    script = Script()
    for _ in range(times):
        script.speech(words).room(pause, -65)
    return script.speech(words)


@pytest.mark.parametrize("name", PAUSES)
def test_what_belongs_to_speech_is_not_cut(name: str) -> None:
    script = PAUSES[name]()
    assert heard(script, STOP) == (script.frames, STOP)


@pytest.mark.parametrize("period", range(1, 41))
def test_loops_of_any_length_are_heard(period: int) -> None:
    script = Script(period).speech(LATE).loop(999, period=period)
    passed, ended = heard(script)
    assert ended is LOOP
    assert LATE + max(38, 2 * period) <= passed <= LATE + period + max(38, 2 * period) + 2


def test_where_it_ends_does_not_depend_on_the_chunks() -> None:
    script = Script().speech(SPOKEN).room(500, -60)
    assert len({heard(script, seed=seed) for seed in range(20)}) == 1


def test_a_stream_that_goes_on_elsewhere_is_as_late_as_it_was() -> None:
    script = Script().speech(10).room(60, -70)
    moved = EndingGuard(SAMPLES, RATE, position=LATE * SAMPLES + 50)
    codes, pcm, ended = moved.truncate(script.codes, script.pcm[50:], None, TOKENS)
    assert (len(codes), len(pcm), ended) == (48, 48 * SAMPLES - 50, SILENCE)


def test_frames_whose_codes_are_known_elsewhere_are_heard() -> None:
    script = Script().speech(4).room(200, -70)
    codes, pcm, ended = EndingGuard(SAMPLES, RATE).truncate(script.codes[150:], script.pcm, None, TOKENS)
    assert (len(codes), len(pcm) // SAMPLES, ended) == (0, 104, SILENCE)


INFO = ModelInfo("m", ModelKind.CUSTOM_VOICE, ("ryan",), (), False, RATE, SAMPLES, GROUPS, 100)
REQUEST = SynthesisRequest("r", "Hello.", voice="ryan")


class Talker:
    def __init__(self, script: Script) -> None:
        self._script = script
        self.num_sent, self.was_left = 0, False

    async def __call__(self, request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        try:
            for frame in range(self._script.frames):
                pcm = self._script.pcm[frame * SAMPLES : (frame + 1) * SAMPLES].tobytes()
                self.num_sent += 1
                yield FrameChunk(self._script.codes[frame : frame + 1], TOKENS, None, pcm)
            yield FrameChunk(self._script.codes[:0], TOKENS, LENGTH)
        except GeneratorExit:
            self.was_left = True
            raise


async def listen(talker: Talker, **changes: bool) -> list[PcmChunk]:
    request = SynthesisRequest("r", "Hello.", voice="ryan", **changes)  # type: ignore[arg-type]
    async with aclosing(with_failover(TalkerAudio(request, talker, INFO))) as chunks:
        return [chunk async for chunk in chunks]


async def test_a_talker_is_left_where_its_speech_is_over() -> None:
    talker = Talker(Script().speech(SPOKEN).room(900, -60))
    chunks = await listen(talker)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [SILENCE]
    assert (talker.was_left, talker.num_sent) == (True, sum(len(chunk.codes) for chunk in chunks))


async def test_silence_is_not_sent_before_it_is_known_to_be_all() -> None:
    chunks = await listen(Talker(Script().room(900, -70)))
    assert chunks[-1].finish_reason is SILENCE
    assert b"".join(chunk.pcm for chunk in chunks) == b""


async def test_who_ignores_the_end_is_not_guarded() -> None:
    chunks = await listen(Talker(Script().speech(SPOKEN).room(300, -60)), ignore_eos=True)
    assert (chunks[-1].finish_reason, sum(len(chunk.codes) for chunk in chunks)) == (LENGTH, SPOKEN + 300)


@pytest.mark.parametrize("samples", [SAMPLES // 2, SAMPLES, 2 * SAMPLES])
def test_patience_is_time_however_long_a_frame_plays(samples: int) -> None:
    """Eight seconds of silence, after three of noise."""
    pcm = np.concatenate([np.tile(np.array([3000, -3000], np.int16), 3 * RATE // 2), np.zeros(12 * RATE, np.int16)])
    codes = np.random.default_rng(0).integers(0, 2048, (len(pcm) // samples, GROUPS)).astype(np.int16)
    _, spoken, reason = EndingGuard(samples, RATE).truncate(codes, pcm[: len(codes) * samples], None, 10 * TOKENS)
    assert reason is SILENCE
    assert len(spoken) / RATE == pytest.approx(3 + 8, abs=2 * samples / RATE)
