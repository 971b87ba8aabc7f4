"""Scheduling of sequences: admission based on free rows and KV blocks, and preemption when blocks run out.

Job segments are called background sequences. They have a separate queue:

- At most one of them is admitted per step, and only if no other sequence is waiting.
- Background sequences occupy at most seven eighths of the rows. Alongside others, they occupy at most half of the
  rows and at most 18 rows. The number falls as the number of other sequences rises.
- Background sequences are preempted only if another sequence would otherwise have no row or no blocks.

While a step is running, `Lanes` may give a listener's new sequence a row (`give_to_lane`), and later lets it `join`.

A sequence waiting for text (`Pacing`) releases its row and blocks if other sequences are waiting for them. It is
prefilled again when no other sequence is waiting, so new text has to wait for only one frame.
"""

import math
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

from deployments.errors import Overloaded
from deployments.limits import Rate
from deployments.talker.state.kv_cache import BlockManager
from deployments.talker.state.sequence import Sequence

_RESERVED = 8  # background sequences leave one row in eight free
# Alongside a listener, background sequences get at most _MOST_BESIDE rows, one fewer for every four listeners, and at
# least _FEWEST_BESIDE. More rows would prolong each step, and decoding their samples takes up time on the device.
_MOST_BESIDE, _LISTENERS_A_ROW, _FEWEST_BESIDE = 18, 4, 4
# A frame is nearly due if the listener has less buffered audio than both limits: a number of steps, and seconds.
_NEARLY_DUE_STEPS = 3
_NEARLY_DUE_S = 0.25


@dataclass(frozen=True, slots=True)
class Batch:
    """The work for one step. Sequences in `prefill` are also in `decode`, unless they sit out."""

    prefill: list[Sequence]
    decode: list[Sequence]


class Scheduler:
    """Scheduler for continuous batching. Sequences join and leave between two frames."""

    def __init__(
        self, blocks: BlockManager, *, max_num_seqs: int, max_num_waiting: int, max_lead_s: float = math.inf
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs, self.max_num_waiting = max_num_seqs, max_num_waiting
        self._pacing = Pacing(max_num_seqs=max_num_seqs, max_lead_s=max_lead_s)
        self.waiting: deque[Sequence] = deque()
        self.waiting_background: deque[Sequence] = deque()
        # All sequences with a row, in `running` or in a lane, by id in order of admission
        self._with_row: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}  # may take part in steps; with or without listeners
        self._running_background: dict[int, Sequence] = {}  # subset of `running`, because each step needs it
        self._free_rows = deque(range(max_num_seqs))  # like blocks, reused in the order in which they were freed
        self._finished = Rate()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing for a step to do: all sequences are waiting for text or for room."""
        all_await_text = all(sequence.awaits_text for sequence in chain(self.running.values(), self.waiting))
        return all_await_text and not self._has_room_for_background() and not any(map(self._fits, self.waiting))

    @property
    def num_listeners(self) -> int:
        """Number of sequences with listeners that have a row, in `running` or in lanes."""
        return len(self._with_row) - len(self._running_background)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def in_lanes(self) -> list[Sequence]:
        """Sequences with a row that have not yet joined the steps. Lanes make their first frames."""
        return [sequence for sequence in self._with_row.values() if sequence.id not in self.running]

    @property
    def num_background(self) -> int:
        """Number of background sequences: running, parked or waiting."""
        return len(self._running_background) + len(self.waiting_background)

    @property
    def kv_used_ratio(self) -> float:
        """Share of KV blocks in use, not counting those of background sequences."""
        of_background = sum(len(self.blocks.table(sequence_id)) for sequence_id in self._running_background)
        return self.blocks.used_ratio - of_background / (self.blocks.num_blocks - 1)

    def check_room(self, *, background: bool = False) -> None:
        """Raise Overloaded if the queue is full. A free row counts as room.

        The background queue is limited to an eighth of the number of rows.
        """
        if background:
            if len(self.waiting_background) >= max(1, self.max_num_seqs // _RESERVED):
                raise Overloaded("The talker has no free rows for jobs.")
            return
        ahead = len(self.waiting) + self.num_listeners
        if ahead >= self.max_num_seqs + self.max_num_waiting:
            raise Overloaded(
                f"The talker is at its limit ({ahead} running or waiting). More replicas, or a higher "
                f"talker.max_num_seqs ({self.max_num_seqs}) or talker.max_num_waiting ({self.max_num_waiting}), "
                "raise the limit.",
                self._finished.retry_after_s(len(self.waiting), time.monotonic()),
            )

    def add(self, sequence: Sequence) -> None:
        """Append a sequence to the queue, or put it at the head if the client already has part of the audio."""
        if sequence.is_background:
            self.waiting_background.append(sequence)
        elif sequence.request.is_continuation:
            self.waiting.appendleft(sequence)
        else:
            self.waiting.append(sequence)

    def find(self, sequence_id: int) -> Sequence | None:
        """Return a running or waiting sequence, else None."""
        if with_row := self._with_row.get(sequence_id):
            return with_row
        waiting = chain(self.waiting, self.waiting_background)
        return next((sequence for sequence in waiting if sequence.id == sequence_id), None)

    def has_row(self, sequence: Sequence) -> bool:
        """Return whether the sequence has a row and has not been aborted."""
        return self._with_row.get(sequence.id) is sequence

    def abort(self, sequence_id: int) -> None:
        """Remove a running or waiting sequence. Ignores a sequence that has ended."""
        if with_row := self._with_row.get(sequence_id):
            self._release(with_row)
        else:
            self.waiting = deque(sequence for sequence in self.waiting if sequence.id != sequence_id)
            self.waiting_background = deque(
                sequence for sequence in self.waiting_background if sequence.id != sequence_id
            )

    def schedule(self) -> Batch | None:
        """Return the batch for the next step; None if there is nothing to do."""
        preempted = self._allocate_running()
        admitted = [] if preempted else self._admit_waiting() or self._admit_background()
        due = self._pacing.due(self.running.values(), time.monotonic(), self._most_background())
        if not due and not admitted:
            return None
        return Batch(prefill=admitted, decode=due)

    def give_to_lane(self, sequence: Sequence) -> None:
        """Give a waiting sequence a row and blocks. The sequence takes part in steps after `join`."""
        self._give_row(sequence)

    def join(self, sequences: list[Sequence]) -> None:
        """Let a lane's sequences take part in the next step, unless they have been aborted."""
        self.running.update({sequence.id: sequence for sequence in sequences if self.has_row(sequence)})

    def retire(self, sequences: list[Sequence]) -> None:
        """Free the rows and blocks of a batch's finished sequences. Aborted sequences no longer have any."""
        now_s = time.monotonic()
        for sequence in sequences:
            sequence.update_listener(now_s)
            if sequence.finish_reason is not None and self.has_row(sequence):
                self._release(sequence)
                self._finished.count(now_s)

    def check_integrity(self) -> None:
        """Assert that each row and block has exactly one owner."""
        held = (sequence.row for sequence in self._with_row.values() if sequence.row is not None)
        rows = sorted([*self._free_rows, *held])
        assert rows == list(range(self.max_num_seqs)), f"rows lost or held twice: {rows}"
        self.blocks.check_integrity()

    def _allocate_running(self) -> bool:
        """Allocate blocks for each running sequence's next position, and preempt sequences if none are free.

        Returns whether a sequence was preempted.
        """
        preempted = False
        for sequence in list(self.running.values()):
            needed = sequence.num_positions + 1
            if self.blocks.has_blocks(sequence.id, needed):
                continue
            while sequence.id in self.running and not self.blocks.can_allocate(sequence.id, needed):
                self._preempt(next(reversed((self._running_background or self.running).values())))
                preempted = True
            if sequence.id in self.running:
                self.blocks.allocate(sequence.id, needed)
        return preempted

    def _preempt(self, sequence: Sequence) -> None:
        """Move a sequence back to the head of the queue. It continues later, after a prefill including its frames."""
        self._release(sequence)
        (self.waiting_background if sequence.is_background else self.waiting).appendleft(sequence)

    def _most_background(self) -> int:
        """Return the maximum number of background sequences that may have rows now, and run alongside others."""
        num_wanting = self.num_listeners + sum(not sequence.awaits_text for sequence in self.waiting)
        left = self.max_num_seqs - self.max_num_seqs // _RESERVED - num_wanting
        if not num_wanting:
            return max(1, left)
        beside = max(_FEWEST_BESIDE, _MOST_BESIDE - num_wanting // _LISTENERS_A_ROW)
        return max(0, min(left, self.max_num_seqs // 2, beside))

    def _admit_background(self) -> list[Sequence]:
        """Admit at most one background sequence, because prefilling more would delay other sequences."""
        return [self._admit(self.waiting_background[0])] if self._has_room_for_background() else []

    def _has_room_for_background(self) -> bool:
        is_free = self.waiting_background and all(sequence.awaits_text for sequence in self.waiting)
        return (
            bool(is_free)
            and len(self._running_background) < self._most_background()
            and self._fits(self.waiting_background[0])
        )

    def _admit_waiting(self) -> list[Sequence]:
        """Admit waiting sequences, preempting others for them. If all fit, also admit those that await text."""
        admitted: list[Sequence] = []
        for sequence in [sequence for sequence in self.waiting if not sequence.awaits_text]:
            if not self._make_room(sequence):
                return admitted
            admitted.append(self._admit(sequence))
        return admitted + [self._admit(sequence) for sequence in [*self.waiting] if self._fits(sequence)]

    def _admit(self, sequence: Sequence) -> Sequence:
        self._give_row(sequence)
        self.running[sequence.id] = sequence
        if sequence.is_background:
            self._running_background[sequence.id] = sequence
        return sequence

    def _give_row(self, sequence: Sequence) -> None:
        (self.waiting_background if sequence.is_background else self.waiting).remove(sequence)
        self._with_row[sequence.id] = sequence
        self.blocks.allocate(sequence.id, sequence.num_positions + 1)
        sequence.row = self._free_rows.popleft()

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt sequences until a row and blocks are free. Returns whether there is room.

        Preempts background sequences first, then sequences waiting for text, youngest first in each case.
        """
        awaiting_text = [running for running in self.running.values() if running.awaits_text]
        preemptible = [*awaiting_text, *self._running_background.values()]
        while not self._fits(sequence):
            if not preemptible:
                return False
            self._preempt(preemptible.pop())
        return True

    def _fits(self, sequence: Sequence) -> bool:
        return bool(self._free_rows) and self.blocks.can_allocate(sequence.id, sequence.num_positions + 1)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        del self._with_row[sequence.id]
        self.running.pop(sequence.id, None)
        self._running_background.pop(sequence.id, None)
        self._free_rows.append(sequence.row)
        sequence.row = None
        self.blocks.free(sequence.id)


class Pacing:
    """Selects the sequences for each step from those with a row.

    Each sequence with a row takes part in a step, with three exceptions.

    1. Sequences far ahead of playback sit out while another sequence waits for its first frame or for a frame that is
       nearly due, because a step with fewer sequences is shorter. Sequences that sit out hold on to their rows longer.
       When more than half of the rows are in use, they therefore sit out only for frames that are nearly due.
    2. A sequence sits out while its next frame needs text that the client has not yet written.
    3. Background sequences sit out in the same cases, and beyond a number that depends on the load. Such
       sequences are parked: they keep their rows and KV blocks. Background sequences never make others sit out.
    """

    def __init__(self, *, max_num_seqs: int, max_lead_s: float) -> None:
        """Sequences with less than `max_lead_s` of buffered audio never sit out for others."""
        self._max_num_seqs, self._max_lead_s = max_num_seqs, max_lead_s
        self._scheduled_s = self._step_s = 0.0  # start of the last step, and duration of the one before

    def due(self, running: Collection[Sequence], now_s: float, most_background: int) -> list[Sequence]:
        """Return the sequences for the step starting now. Call this once per step, because it measures step durations.

        Alongside others, the step has at most `most_background` background sequences, oldest first.
        """
        self._step_s, self._scheduled_s = now_s - self._scheduled_s, now_s
        background = [sequence for sequence in running if sequence.is_background]
        ready = [sequence for sequence in running if not sequence.awaits_text and not sequence.is_background]
        if not ready or (self._max_lead_s == math.inf and not background):
            return background + ready
        leads = [sequence.listener.lead_s(now_s) for sequence in ready]
        if not self._has_urgent(ready, leads, has_rows=2 * (len(running) - len(background)) <= self._max_num_seqs):
            return background[:most_background] + ready
        due = [sequence for sequence, lead_s in zip(ready, leads, strict=True) if lead_s < self._max_lead_s]
        return due or ready

    def _has_urgent(self, ready: list[Sequence], leads: list[float], *, has_rows: bool) -> bool:
        """Return whether one of these is waiting for a frame that other sequences should sit out for."""
        nearly_due_s = min(_NEARLY_DUE_S, _NEARLY_DUE_STEPS * self._step_s)
        return any(
            lead_s < nearly_due_s if sequence.listener.has_begun else has_rows
            for sequence, lead_s in zip(ready, leads, strict=True)
        )
