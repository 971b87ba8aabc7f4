"""Who runs in the next step: admission by free rows and KV blocks, preemption when blocks run out."""

import heapq
import time
from collections import deque
from dataclasses import dataclass

from deployments.errors import Overloaded
from deployments.rate import Rate
from deployments.talker.block_manager import BlockManager
from deployments.talker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work: `prefill` is also part of `decode`, a new sequence has its first frame in the same step."""

    prefill: list[Sequence]
    decode: list[Sequence]


class Scheduler:
    """Continuous batching: sequences join and leave between two frames."""

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, max_num_waiting: int) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_waiting = max_num_waiting
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # in the order of admission
        self._free_rows = list(range(max_num_seqs))
        self._finished = Rate()

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.waiting and not self.running

    def check_room(self) -> None:
        """Raise Overloaded where the waiting line is full. A free row is room, whoever takes it next step."""
        ahead = len(self.waiting) + len(self.running)
        if ahead >= self.max_num_seqs + self.max_num_waiting:
            raise Overloaded(
                f"{ahead} requests run or wait on this talker, its limit is {ahead}",
                self._finished.retry_after_s(len(self.waiting), time.monotonic()),
            )

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the waiting line; one that a listener hears already goes before all others."""
        if sequence.request.is_heard:
            self.waiting.appendleft(sequence)
        else:
            self.waiting.append(sequence)

    def abort(self, sequence_id: int) -> None:
        """Forget a sequence, running or waiting. One that has ended meanwhile is no error."""
        if sequence_id in self.running:
            self._release(self.running[sequence_id])
        else:
            self.waiting = deque(sequence for sequence in self.waiting if sequence.id != sequence_id)

    def schedule(self) -> Batch | None:
        """The next step's batch, None when there is nothing to do."""
        preempted = self._make_room()
        admitted = [] if preempted else self._admit()
        if not self.running:
            return None
        return Batch(prefill=admitted, decode=list(self.running.values()))

    def retire(self, batch: Batch) -> None:
        """Give back what the batch's finished sequences held."""
        for sequence in batch.decode:
            if sequence.finish_reason is not None:
                self._release(sequence)
                self._finished.count(time.monotonic())

    def check_integrity(self) -> None:
        """Assert that rows and blocks are each held exactly once."""
        rows = sorted(
            [*self._free_rows, *(sequence.row for sequence in self.running.values() if sequence.row is not None)]
        )
        assert rows == list(range(self.max_num_seqs)), f"rows lost or held twice: {rows}"
        self.blocks.check_integrity()

    def _make_room(self) -> bool:
        """Blocks for every running sequence's next position; whether a sequence had to give its own up for that."""
        preempted = False
        for sequence in list(self.running.values()):
            while sequence.id in self.running and not self.blocks.can_hold(sequence.id, sequence.num_positions + 1):
                self._preempt(next(reversed(self.running.values())))
                preempted = True
            if sequence.id in self.running:
                self.blocks.grow(sequence.id, sequence.num_positions + 1)
        return preempted

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the line: it will be prefilled again, frames included, and go on as if nothing was."""
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _admit(self) -> list[Sequence]:
        admitted = []
        while self.waiting and self._free_rows:
            sequence = self.waiting[0]
            if not self.blocks.can_hold(sequence.id, sequence.num_positions + 1):
                break
            self.blocks.grow(sequence.id, sequence.num_positions + 1)
            sequence.row = heapq.heappop(self._free_rows)
            self.running[sequence.id] = self.waiting.popleft()
            admitted.append(sequence)
        return admitted

    def _release(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        del self.running[sequence.id]
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = None
        self.blocks.free(sequence.id)
