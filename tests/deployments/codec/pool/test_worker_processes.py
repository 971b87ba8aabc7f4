"""Decoder processes give what the decoder in this process gives, whatever happens to one of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deployments.codec.batch import Decoded, DecodeTask, decode_batch
from deployments.codec.decoder import CodecDecoder
from deployments.codec.decoder_state import DecoderState
from deployments.codec.pool import worker_process
from deployments.codec.pool.shared_states import SharedStates
from deployments.codec.pool.workers import DecoderChoice, SharedTask, WorkerProcesses
from deployments.errors import CodecLost, EngineError

COUNT = 2


def choice(directory: Path) -> DecoderChoice:
    return DecoderChoice(str(directory), "float32", (1, 4), 0.25)


@pytest.fixture(scope="module")
def processes(decoder: CodecDecoder, directory: Path) -> Iterator[WorkerProcesses]:
    processes = WorkerProcesses(COUNT, decoder, choice(directory))
    yield processes
    processes.stop()


def workers(processes: WorkerProcesses) -> list[int]:
    """Those that were forked from the first."""
    first = processes._first.pid
    return [int(pid) for pid in Path(f"/proc/{first}/task/{first}/children").read_text().split()]


def task(codes: torch.Tensor, state: DecoderState, *, state_only: bool = False) -> DecodeTask:
    return DecodeTask(codes.numpy().astype(np.int16), state, 0.0, state_only)


def decoded(outcome: Decoded | Exception) -> Decoded:
    assert isinstance(outcome, Decoded), outcome
    return outcome


def test_streams_are_decoded_as_in_here(processes: WorkerProcesses, decoder: CodecDecoder, codes: torch.Tensor) -> None:
    """In one call or in turns, silently or not, also from a state that lies in this process."""
    begun = decode_batch(decoder, [task(row[:1], decoder.initial_state()) for row in codes])
    theirs = [decoder.initial_state(), *(decoded(outcome).state for outcome in begun[1:])]
    ours, begins = list(theirs), [0, 1, 1]
    for size, state_only in ((1, False), (4, False), (3, True), (4, False)):
        rows = [row[first : first + size] for row, first in zip(codes, begins, strict=True)]
        pairs = []
        for states, call in ((theirs, processes.decode), (ours, lambda tasks: decode_batch(decoder, tasks))):
            outcomes = call([task(row, state, state_only=state_only) for row, state in zip(rows, states, strict=True)])
            states[:] = [decoded(outcome).state for outcome in outcomes]
            pairs.append([decoded(outcome).pcm for outcome in outcomes])
        for their_pcm, our_pcm in zip(*pairs, strict=True):
            np.testing.assert_array_equal(their_pcm, our_pcm)
        assert [state.position for state in theirs] == [state.position for state in ours]
        begins = [first + size for first in begins]


def test_silent_streams_and_others_of_one_length_share_a_call(decoder: CodecDecoder, codes: torch.Tensor) -> None:
    tasks = [task(row[:2], decoder.initial_state(), state_only=number != 1) for number, row in enumerate(codes)]
    outcomes = [decoded(outcome) for outcome in decode_batch(decoder, tasks)]
    assert [len(outcome.pcm) > 0 for outcome in outcomes] == [not each.state_only for each in tasks]
    assert {outcome.state.position for outcome in outcomes} == {2}


def test_every_size_of_a_call_is_known_before_the_first(processes: WorkerProcesses) -> None:
    assert {*processes.warm_up_result.largest_batches} == {1, 4}
    assert min(processes.warm_up_result.largest_batches.values()) >= 1
    assert processes.warm_up_result.seconds_per_frame > 0


def test_a_state_can_be_used_again(processes: WorkerProcesses, decoder: CodecDecoder, codes: torch.Tensor) -> None:
    (begun,) = processes.decode([task(codes[0, :4], decoder.initial_state())])
    state = decoded(begun).state
    once, again = (decoded(*processes.decode([task(codes[0, 4:8], state)])).pcm for _ in range(2))
    np.testing.assert_array_equal(once, again)


def test_a_bad_job_fails_alone(processes: WorkerProcesses, decoder: CodecDecoder, codes: torch.Tensor) -> None:
    good, broken = codes[0, :1], torch.full((1, codes.shape[2]), 999)
    first, bad, last = processes.decode([task(each, decoder.initial_state()) for each in (good, broken, good)])
    assert isinstance(bad, EngineError)
    np.testing.assert_array_equal(decoded(first).pcm, decoded(last).pcm)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_ends_or_hangs_is_replaced_and_its_call_made_again(
    processes: WorkerProcesses, decoder: CodecDecoder, codes: torch.Tensor, monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:  # fmt: skip
    monkeypatch.setattr("deployments.codec.pool.workers._LONGEST_IDLENESS_S", 0.3)
    before, descriptors = workers(processes), f"/proc/{processes._first.pid}/fd"
    num_open = len(os.listdir(descriptors))
    assert len(before) == COUNT
    os.kill(before[0], number)
    begun = [decoded(*processes.decode([task(codes[0, :4], decoder.initial_state())])) for _ in range(2 * COUNT)]
    (expected,) = decode_batch(decoder, [task(codes[0, :4], decoder.initial_state())])
    for each in begun:
        np.testing.assert_array_equal(each.pcm, decoded(expected).pcm)
    after = workers(processes)
    assert (len(after), before[0] in after, before[1] in after) == (COUNT, False, True)
    assert len(os.listdir(descriptors)) == num_open, "only the worker keeps its socket"
    assert not processes.is_broken


def test_cells_are_free_once_nobody_holds_their_states(decoder: CodecDecoder) -> None:
    descriptor = os.memfd_create("states")
    states = SharedStates(decoder.initial_state(), descriptor)
    other = SharedStates(decoder.initial_state(), descriptor)  # as another process has it
    os.close(descriptor)
    cells = [states.acquire(), states.acquire()]
    assert cells[0].number != cells[1].number
    tensors = [torch.full_like(tensor, 3) for tensor in decoder.initial_state().tensors]
    states.write(cells[1].number, tensors)
    assert all(map(torch.equal, other.read(cells[1].number), tensors))
    assert not any(tensor.any() for tensor in other.read(cells[0].number))
    number = cells.pop().number
    assert states.acquire().number == number


def test_memory_of_states_ends(decoder: CodecDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.codec.pool.shared_states._CELLS", 1)
    descriptor = os.memfd_create("states")
    states = SharedStates(decoder.initial_state(), descriptor)
    os.close(descriptor)
    held = states.acquire()
    with pytest.raises(MemoryError, match="all 1 cells"):
        states.acquire()
    del held


def test_without_the_first_process_none_restarts(decoder: CodecDecoder, directory: Path, codes: torch.Tensor) -> None:
    processes = WorkerProcesses(1, decoder, choice(directory))
    (worker,) = workers(processes)
    processes._first.kill()
    processes._first.wait()
    assert processes.is_broken
    processes.decode([task(codes[0, :1], decoder.initial_state())])  # those that are there work on
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(CodecLost, match="parent process"):
        processes.decode([task(codes[0, :1], decoder.initial_state())])
    processes.stop()


def test_a_decoder_that_does_not_load_says_so(decoder: CodecDecoder, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="exited with code 1 while loading"):
        WorkerProcesses(1, decoder, choice(tmp_path))


_REPLICA = """
import json, os, signal, sys
from pathlib import Path
from deployments.codec.pool.workers import DecoderChoice
from deployments.codec.backends.registry import load_decoder
from deployments.codec.pool.workers import WorkerProcesses
choice = DecoderChoice(**json.loads(sys.argv[1]))
processes = WorkerProcesses(2, load_decoder(Path(choice.directory)), choice)
first = processes._first.pid
print(first, Path(f"/proc/{first}/task/{first}/children").read_text(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_they_end_with_their_replica(directory: Path) -> None:
    command = [sys.executable, "-c", _REPLICA, json.dumps(asdict(choice(directory)))]
    replica = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert replica.returncode == -signal.SIGKILL
    left = [int(pid) for pid in replica.stdout.split()]
    assert len(left) == 3
    deadline_s = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/exe").exists() for pid in left):
        assert time.monotonic() < deadline_s, "decoder processes outlive their replica"
        time.sleep(0.01)


def test_a_worker_counts_what_each_call_repaired(decoder: CodecDecoder, codes: torch.Tensor) -> None:
    states = SharedStates(decoder.initial_state(), os.memfd_create("states"))
    asked = SharedTask(codes[0, :1].numpy().astype(np.int16), 0, None, 3, state_only=False, followed_by=0)
    sent, coming = list[Any](), [[asked], [asked, replace(asked, target=4)]]

    def repaired(codes: torch.Tensor, states: list[DecoderState]) -> object:
        decoder.repaired += len(codes)
        return CodecDecoder.decode(decoder, codes, states)

    def receive() -> list[SharedTask]:
        if not coming:
            raise EOFError
        return coming.pop(0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(decoder, "decode", repaired)
        worker_process.serve(SimpleNamespace(send=sent.append, recv=receive), decoder, states)  # type: ignore[arg-type]
    assert [sent[0], *(each.repaired for each in sent[1:])] == [os.getpid(), 1, 2]
    assert [position for _, position in sent[2].outcomes] == [1, 1]
    assert all(map(torch.equal, states.read(3), states.read(4)))
