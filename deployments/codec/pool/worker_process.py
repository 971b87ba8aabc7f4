"""Decodes for a replica of several workers: `python -m deployments.codec.pool.worker_process CONTROL STATES DECODER`.

The first process loads the decoder and makes every call once. Then it forks a worker for each socket that it is sent,
so all of them share one copy of the weights, in memory and in the processor's cache, and a dead one is replaced at
once. Neither runs a second thread: a fork would lose it. Each ends when its socket does.
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
from deployments.codec.decoder_state import DecoderState, SharedStates
from deployments.codec.pool.workers import DecoderChoice, SharedOutcome, SharedOutcomes, SharedTask
from deployments.serving.collector import freeze_loaded


def serve(connection: Connection, decoder: CodecDecoder, states: SharedStates) -> None:
    """Decode incoming tasks until the other end closes."""
    initial = decoder.initial_state()

    def state(task: SharedTask) -> DecoderState:
        return initial if task.source is None else DecoderState(task.position, states.read(task.source))

    connection.send(os.getpid())
    while True:
        try:
            shared: list[SharedTask] = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        tasks = [DecodeTask(task.codes, state(task), 0.0, task.silent, task.followed_by) for task in shared]
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
    """Load, then fork until the replica closes `control`."""
    torch.set_num_threads(1)
    asked = DecoderChoice(**json.loads(choice))
    decoder = load_decoder(Path(asked.directory), precision=asked.precision)
    tried = warm_up(decoder, asked.chunk_frames, asked.max_call_s)
    states = SharedStates(decoder.initial_state(), descriptor)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process that has threads must not be forked"
    freeze_loaded()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers that end
    with socket.socket(fileno=control) as ours:
        ours.sendall(json.dumps(asdict(tried)).encode() + b"\n")
        while received := _received(ours):
            if os.fork() == 0:
                ours.close()
                serve(Connection(received[0]), decoder, states)
                os._exit(0)
            os.close(received[0])


def _received(control: socket.socket) -> Sequence[int]:
    """The next worker's socket; empty once the replica is gone."""
    try:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    except ConnectionResetError:
        return []
    return descriptors


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
