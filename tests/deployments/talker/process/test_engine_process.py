"""The process's loop, driven over a socket pair from a thread of this process."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from deployments.config import TalkerConfig
from deployments.errors import CheckpointError, EngineError, InvalidRequest, TalkerLost
from deployments.protocol import FrameChunk, Reference
from deployments.recording_cache import VOICE_BYTES, Lookups
from deployments.talker.audio.audio_streams import AudioStreams
from deployments.talker.engine import input_processor
from deployments.talker.engine.engine import Engine, StepOutput
from deployments.talker.process import channel
from deployments.talker.process.channel import EngineStart
from deployments.talker.process.engine_process import EngineProcess, take_load
from deployments.talker.text.tokenizer import TextTokenizer
from tests.deployments.talker.conftest import CONFIG
from tests.deployments.talker.driving import ask


def starts(model: str, config: TalkerConfig) -> EngineStart:
    return EngineStart(model=model, config=config, makes_audio=True)


class Replica:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unpacker = channel.Unpacker()
        self.reports = self._read()

    def send(self, *commands: channel.Command) -> None:
        self.connection.sendall(b"".join(channel.encode(command) for command in commands))

    def until(self, condition: Callable[[channel.EngineEvent], bool]) -> list[channel.EngineEvent]:
        seen = []
        for report in self.reports:
            seen.append(report)
            if condition(report):
                return seen
        raise AssertionError(f"the socket closed after {seen}")

    def _read(self) -> Iterator[channel.EngineEvent]:
        while data := self.connection.recv(1 << 16):
            for message in self.unpacker.feed(data):
                assert isinstance(message, channel.EngineEvent)
                yield message


@contextmanager
def engine_process(start: EngineStart, ends_with: type[Exception] = ConnectionError) -> Iterator[Replica]:
    """The replica's end of a process that runs in a thread; it ends with the socket."""
    ours, theirs = socket.socketpair()
    ended: list[BaseException] = []

    def run() -> None:
        with theirs:
            try:
                EngineProcess(theirs).run(start)
            except (ConnectionError, CheckpointError, ends_with) as error:
                ended.append(error)

    thread = Thread(target=run)
    thread.start()
    with ours:
        yield Replica(ours)
    thread.join()
    assert len(ended) == 1


def is_ready(report: channel.EngineEvent) -> bool:
    return isinstance(report, channel.Ready)


@contextmanager
def loaded(start: EngineStart, ends_with: type[Exception] = ConnectionError) -> Iterator[Replica]:
    """As `engine_process`, once it takes requests."""
    with engine_process(start, ends_with) as replica:
        replica.until(is_ready)
        yield replica


def is_last(number: int) -> Callable[[channel.EngineEvent], bool]:
    return lambda report: (
        isinstance(report, channel.Produced)
        and any(each == number and chunk.finish_reason is not None for each, chunk in report.chunks)
    )


def has_frames(report: channel.EngineEvent) -> bool:
    return isinstance(report, channel.Produced) and bool(report.chunks)


def chunks_of(reports: list[channel.EngineEvent], number: int) -> list[FrameChunk]:
    produced = [report for report in reports if isinstance(report, channel.Produced)]
    return [chunk for report in produced for each, chunk in report.chunks if each == number]


@pytest.fixture
def start(checkpoint: Path) -> EngineStart:
    return starts(str(checkpoint), CONFIG.model_copy(update={"max_num_seqs": 1, "max_num_waiting": 1}))


class WithPlace(Exception):
    """As compilers raise them: it cannot be made of its message alone, so nobody can unpickle it."""

    def __init__(self, line: int, column: int) -> None:
        super().__init__(f"no instruction for this at {line}:{column}")


def test_any_error_of_the_start_is_told_in_its_own_words(start: EngineStart, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Mock(side_effect=WithPlace(3, 4))
    monkeypatch.setattr("deployments.talker.process.engine_process.load_engine", load)
    with engine_process(start.model_copy(update={"makes_audio": False}), WithPlace) as replica:
        *_, last = replica.reports
    assert isinstance(last, channel.RequestFailed)
    assert isinstance(last.error, EngineError)
    assert load.call_args.kwargs == {"makes_audio": False}
    assert str(last.error) == "the engine does not start: WithPlace('no instruction for this at 3:4')"


def test_it_tells_what_it_loads_and_loaded(start: EngineStart, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(model: str, report: Callable[[str], None]) -> Path:
        report("downloading 1B of 2B")
        return Path(model)

    monkeypatch.setattr("deployments.talker.process.engine_process.locate", download)
    with engine_process(start) as replica:
        *loading, ready = replica.until(is_ready)
        stages = [report.stage for report in loading if isinstance(report, channel.Loading)]
        assert (len(stages), stages[0]) == (len(loading), f"looking for {start.model}")
        assert "loading the talker" in stages
        assert " s in all: " in stages[-1]
        assert stages[-2].endswith(" on cpu, room for 1 minutes of speech at once")  # of 512 frames
        assert "downloading 1B of 2B" in stages
        assert isinstance(ready, channel.Ready)
        assert ready.info == replace(engine.info, name=start.model)


def test_a_request_arrives_before_its_prompt_is_built(start: EngineStart, monkeypatch: pytest.MonkeyPatch) -> None:
    added_ns, add = list[int](), Engine.add
    monkeypatch.setattr(Engine, "add", lambda *args: (added_ns.append(time.time_ns()), add(*args)))
    with loaded(start) as replica:
        replica.send(channel.Submit(4, replace(ask(), marks=(("sent", 0),))))
        reports = replica.until(is_last(4))
    [(_, arrived_ns), *_] = marks = chunks_of(reports, 4)[0].marks[1:]
    assert [name for name, _ in marks] == ["to-engine", "prompt", "codes"]
    assert arrived_ns <= added_ns[-1]


def test_it_counts_who_runs_and_who_waits(start: EngineStart) -> None:
    with loaded(start) as replica:
        replica.send(channel.Submit(1, ask(ignore_eos=True)), channel.Submit(2, ask(ignore_eos=True)))
        first = replica.until(has_frames)[-1]
        assert isinstance(first, channel.Produced)
        assert (first.load.num_running, first.load.num_waiting) == (1, 1)


def test_its_load_counts_the_lookups_of_each_cache_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And jobs apart from others."""
    monkeypatch.setattr(AudioStreams, "repaired", 3)
    take_load(engine)
    for number in range(3):
        engine.add(number, ask("Short.", background=number > 0))
        engine.step()
    engine.add(3, ask("Short.", background=True))  # it waits
    load = take_load(engine)
    assert (load.num_running, load.num_waiting, load.num_background, load.repaired) == (1, 0, 3, 3)
    assert 0 < load.kv_used_ratio < engine.scheduler.blocks.used_ratio
    for number in range(4):
        engine.abort(number)
    for _ in range(3):
        engine.prompts.references.get(bytes(VOICE_BYTES), lambda: np.zeros((1, 16), np.int16))
    load = take_load(engine)
    assert (load.speakers, load.references) == (Lookups(), Lookups(hits=2, misses=1))
    assert take_load(engine).references == Lookups()


def test_an_idle_engine_still_reports(start: EngineStart) -> None:
    with loaded(start) as replica:
        for _ in range(2):
            assert replica.until(lambda report: isinstance(report, channel.Heartbeat)) == [channel.Heartbeat()]


@pytest.mark.parametrize("ends", ["tokenized", "aborted"])
def test_a_long_text_is_tokenized_aside(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """Others are spoken to meanwhile, and the process says that it is alive."""
    long, going_on, ahead = "word " * 40, Event(), TextTokenizer.encode_ahead
    exact = TextTokenizer.encode_places

    def held(tokenizer: TextTokenizer, text: str) -> None:
        assert going_on.wait(60)
        ahead(tokenizer, text)

    def inline(tokenizer: TextTokenizer, text: str) -> tuple[list[int], list[int]]:
        assert len(text) < 150 or text in tokenizer._ahead
        return exact(tokenizer, text)

    monkeypatch.setattr(TextTokenizer, "encode_ahead", held)
    monkeypatch.setattr(TextTokenizer, "encode_places", inline)
    monkeypatch.setattr(input_processor, "_LONG_CHARS", 150)
    with loaded(starts(str(checkpoint), CONFIG)) as replica:
        replica.send(channel.Submit(1, ask(long, frames=2, ignore_eos=True)))
        replica.send(channel.Submit(2, ask(frames=3, ignore_eos=True)))
        seen = replica.until(is_last(2))
        seen += replica.until(lambda report: isinstance(report, channel.Heartbeat))
        assert not chunks_of(seen, 1)
        if ends == "aborted":
            replica.send(channel.Abort(1), channel.Submit(3, ask(frames=2, ignore_eos=True)))
            replica.until(is_last(3))
        going_on.set()
        if ends == "tokenized":
            assert sum(len(chunk.codes) for chunk in chunks_of(replica.until(is_last(1)), 1)) == 2


def test_it_says_that_nothing_runs_after_the_last_abort(start: EngineStart) -> None:
    def is_free(report: channel.EngineEvent) -> bool:
        return isinstance(report, channel.Produced) and (report.load.num_running, report.load.num_waiting) == (0, 0)

    with loaded(start) as replica:
        replica.send(channel.Submit(1, ask("Hello there. " * 10, frames=400, ignore_eos=True)))
        replica.until(has_frames)
        replica.send(channel.Abort(1))
        [*_, last] = replica.until(is_free)
        assert isinstance(last, channel.Produced)
        assert (last.chunks, last.step_s) == ((), 0.0)  # no step ran, so metrics must not count one


def test_it_ends_with_its_socket(start: EngineStart) -> None:
    """While it loads, while it is idle, and while it speaks."""
    with engine_process(start):
        pass
    with loaded(start):
        pass
    with loaded(start) as speaking:
        speaking.send(channel.Submit(1, ask("Hello there. " * 10, frames=400, ignore_eos=True)))
        speaking.until(has_frames)


def test_a_request_that_trips_the_engine_fails_alone(start: EngineStart) -> None:
    with loaded(start) as replica:
        replica.send(channel.Submit(1, ask(language="klingon")), channel.Submit(2, ask(frames=4, ignore_eos=True)))
        reports = replica.until(is_last(2))
    [failed] = [report for report in reports if isinstance(report, channel.RequestFailed)]
    assert (failed.sequence_id, type(failed.error)) == (1, EngineError)
    assert "klingon" in str(failed.error)


def break_state(monkeypatch: pytest.MonkeyPatch, number: int, *, after: int) -> None:
    """From its frame `after` on, the state of sequence `number` is no number."""
    step = Engine.step

    def breaking_step(engine: Engine, meanwhile: Callable[[], None] = lambda: None) -> StepOutput:
        output = step(engine, meanwhile)
        sequence = engine.scheduler.running.get(number)
        if sequence is not None and sequence.num_frames >= after:
            engine.runner.run_pending_advance()
            engine.runner.state.hidden[sequence.row] = torch.nan
        return output

    monkeypatch.setattr(Engine, "step", breaking_step)


def test_a_stream_that_comes_to_nan_is_sent_away_alone(start: EngineStart, monkeypatch: pytest.MonkeyPatch) -> None:
    break_state(monkeypatch, 1, after=5)
    config = start.config.model_copy(update={"max_num_seqs": 2})
    with loaded(starts(start.model, config)) as replica:
        replica.send(*(channel.Submit(number, ask(frames=12, ignore_eos=True)) for number in (1, 2)))
        reports = replica.until(is_last(2))
    [failed] = [report for report in reports if isinstance(report, channel.RequestFailed)]
    assert (failed.sequence_id, type(failed.error)) == (1, TalkerLost)
    assert len(chunks_of(reports, 1)) == 5
    assert len(chunks_of(reports, 2)) == 12
    broken, sound = (np.concatenate([chunk.codes for chunk in chunks_of(reports, number)]) for number in (1, 2))
    assert np.array_equal(broken, sound[:5])


def test_a_second_one_ends_the_process(start: EngineStart, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream may have itself to blame, two have the same GPU."""
    break_state(monkeypatch, 1, after=5)
    break_state(monkeypatch, 2, after=3)
    with loaded(start, ends_with=EngineError) as replica:
        replica.send(*(channel.Submit(number, ask(frames=12, ignore_eos=True)) for number in (1, 2)))
        reports = list(replica.reports)
    assert [len(chunks_of(reports, number)) for number in (1, 2)] == [5, 3]


@pytest.mark.parametrize(("fails", "error", "num_chunks"), [
    ("step", RuntimeError("CUDA error: an illegal memory access was encountered"), 0),
    ("check_integrity", AssertionError("rows lost"), 2),  # once it is idle
])  # fmt: skip
def test_an_engine_that_is_broken_ends_its_process(
    start: EngineStart, monkeypatch: pytest.MonkeyPatch, fails: str, error: Exception, num_chunks: int
) -> None:
    with loaded(start, ends_with=type(error)) as replica:
        monkeypatch.setattr(Engine, fails, Mock(side_effect=error))
        replica.send(channel.Submit(1, ask(frames=2, ignore_eos=True)))
        assert len(chunks_of([*replica.reports], 1)) == num_chunks


@pytest.mark.parametrize("error", [InvalidRequest("too long"), ValueError("tripped")])
def test_text_that_trips_the_engine_ends_its_stream(error: Exception) -> None:
    """It may have a row. No marks are kept of it, nor of one that is aborted."""
    engine, (ours, theirs) = Mock(append_text=Mock(side_effect=error)), socket.socketpair()
    with ours, theirs:
        process, chunks = EngineProcess(theirs), ((4, FrameChunk(np.zeros((1, 16), np.int16), 1)),)
        process._execute(engine, channel.Append(3, "Hello.", is_last=False))
        process._execute(engine, channel.Submit(4, replace(ask(), marks=(("sent", 0),))))
        process._execute(engine, channel.Abort(4))
        assert process.first_audio_marks.mark_first_audio(chunks) is chunks
        assert [call.args for call in engine.abort.call_args_list] == [(3,), (4,)]
        [failed] = channel.Unpacker().feed(ours.recv(1 << 16))
        assert isinstance(failed, channel.RequestFailed)
        assert (failed.sequence_id, str(error) in str(failed.error)) == (3, True)


LARGE_REPORTS: list[channel.Command | channel.EngineEvent] = [channel.Loading(str(n) * 400_000) for n in range(4)]


def test_a_report_waits_for_a_busy_replica_and_the_engine_does_not() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process, unpacker = EngineProcess(theirs), channel.Unpacker()
        for report in LARGE_REPORTS:
            process._send(report)  # type: ignore[arg-type]
        came: list[channel.Command | channel.EngineEvent] = []
        while len(came) < len(LARGE_REPORTS):
            came += unpacker.feed(ours.recv(1 << 20))
            assert process._wait_for_data(0) is False
        assert came == LARGE_REPORTS


def test_an_engine_whose_replica_does_not_read_for_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.talker.process.engine_process._MOST_UNSENT_BYTES", 1 << 18)  # less than a report
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(20)
        process, unpacker = EngineProcess(theirs), channel.Unpacker()
        sending = Thread(target=lambda: [process._send(report) for report in LARGE_REPORTS])  # type: ignore[func-returns-value, arg-type]
        sending.start()
        came = list[channel.Command | channel.EngineEvent]()
        while len(came) < len(LARGE_REPORTS):  # times out if the process keeps a report for later instead of waiting
            came += unpacker.feed(ours.recv(1 << 12))
        sending.join()
        assert came == LARGE_REPORTS


def test_a_large_command_is_read_to_its_end_but_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = EngineProcess(theirs)
        recording = Reference(np.zeros(240_000, np.float32), "Said.")
        large = channel.encode(channel.Submit(1, ask(voice=None, reference=recording)))
        writing = Thread(target=ours.sendall, args=(large + large[:1000],))
        writing.start()
        commands, reads = process._receive(timeout_s=10), 1
        while not commands:  # on a machine that is too busy the rest comes too late
            commands, reads = process._receive(timeout_s=10), reads + 1
        assert [command.sequence_id for command in commands if isinstance(command, channel.Submit)] == [1]
        assert reads < 4  # there is room for a quarter of it in the socket
        writing.join()
        began_s = time.monotonic()
        assert process._receive(timeout_s=0) == []
        assert time.monotonic() - began_s < 5
