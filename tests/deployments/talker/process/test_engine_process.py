"""The process's loop, driven over a socket pair from a thread of this process."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from deployments.config import TalkerConfig
from deployments.errors import CheckpointError, EngineError, TalkerLost
from deployments.protocol import FrameChunk, Reference
from deployments.talker.engine.engine import Engine, StepOutput
from deployments.talker.process import channel
from deployments.talker.process.channel import EngineStart
from deployments.talker.process.engine_process import EngineProcess
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


def test_it_ends_with_its_socket(start: EngineStart) -> None:
    """While it loads, while it is idle, and while it speaks."""
    with engine_process(start):
        pass
    with loaded(start):
        pass
    with loaded(start) as speaking:
        speaking.send(channel.Submit(1, ask("Hello there. " * 10, frames=400, ignore_eos=True)))
        speaking.until(has_frames)


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
