"""Worker process of a replica: `python -m deployments.codec.pool.worker_process CONTROL STATES DECODER`.

The first process loads the decoder and runs each call shape once. The process then forks a worker for each socket
received on CONTROL. All workers share one copy of the weights in memory and in the processor's cache, and a dead worker
is replaced immediately. The processes stay single-threaded, because a fork copies only one thread. Each process exits
when its socket closes.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from deployments.codec.backends.registry import load_decoder
from deployments.codec.batch import Decoded, DecodeTask, decode_batch
from deployments.codec.decoder import CodecDecoder, warm_up
from deployments.codec.decoder_state import DecoderState
from deployments.codec.pool.shared_states import SharedStates
from deployments.codec.pool.workers import DecoderChoice, SharedOutcome, SharedOutcomes, SharedTask
from deployments.serving.processes import freeze_loaded


def serve(connection: Connection, decoder: CodecDecoder, states: SharedStates) -> None:
    """Decode tasks from `connection` until the replica closes it."""
    initial = decoder.initial_state()

    def state(task: SharedTask) -> DecoderState:
        return initial if task.source is None else DecoderState(task.position, states.read(task.source))

    connection.send(os.getpid())
    while True:
        try:
            shared: list[SharedTask] = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        tasks = [DecodeTask(task.codes, state(task), 0.0, task.state_only, task.followed_by) for task in shared]
        before = decoder.repaired
        outcomes = [_kept(*pair, states) for pair in zip(shared, decode_batch(decoder, tasks), strict=True)]
        try:
            connection.send(SharedOutcomes(outcomes, decoder.repaired - before))
        except BrokenPipeError:
            return


def _kept(task: SharedTask, outcome: Decoded | Exception, states: SharedStates) -> SharedOutcome:
    if isinstance(outcome, Exception):
        return outcome
    states.write(task.target, outcome.state.tensors)
    return outcome.pcm, outcome.state.position


def main(control: int, descriptor: int, choice: str) -> None:
    """Load the checkpoint once, then fork a worker for each socket received on `control`, until it closes."""
    torch.set_num_threads(1)
    asked = DecoderChoice(**json.loads(choice))
    decoder = load_decoder(Path(asked.directory), precision=asked.precision)
    warm_up_result = warm_up(decoder, asked.chunk_frames, asked.max_call_s)
    states = SharedStates(decoder.initial_state(), descriptor)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a multi-threaded process must not fork"
    freeze_loaded()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers that exit
    with socket.socket(fileno=control) as ours:
        ours.sendall(json.dumps(asdict(warm_up_result)).encode() + b"\n")
        while received := _received(ours):
            if os.fork() == 0:
                ours.close()
                serve(Connection(received[0]), decoder, states)
                os._exit(0)
            os.close(received[0])


def _received(control: socket.socket) -> Sequence[int]:
    """Return the next worker's socket; empty after the replica has closed `control`."""
    try:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    except ConnectionResetError:
        return []
    return descriptors


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
