"""One stream whose audio is made beside the talker: how many of its frames are written, in calls, and decoded."""

import math
from dataclasses import dataclass, field

from deployments.codec.plan import GPU_RAMP, ChunkPlan, call_sizes, parts
from deployments.codec.slots import CODE_RING
from deployments.listener import Listener

MAX_WAITING = CODE_RING // 2
_MIN_LEAD_S = 0.06  # covers a decode and a frame of the talker
_CALL_SIZES = call_sizes(GPU_RAMP)
_RECALL_PATIENCE_S = 0.1  # a recall takes many calls, so younger streams may go first for this time
# A stream whose listener has _SHARING_LEAD_S of audio in hand waits for others that share its call, for _SHARE_WAIT_S.
_SHARING_LEAD_S = 0.4
_SHARE_WAIT_S = 0.1


@dataclass(slots=True, eq=False)
class AudioStream:
    """The frames of one stream. It changes by its methods only, each of which finds out when it may want a call."""

    sequence_id: int
    slot: int
    num_recalled: int  # frames at the beginning whose audio exists already
    num_wanted: int  # frames to decode in all, with the recalled ones
    opened_s: float
    frame_s: float  # seconds of audio of a frame
    is_background: bool  # a segment of a job
    listener: Listener
    num_before: int = 0  # frames of the sequence whose audio its listener had when it opened
    begins_with: bytes = b""  # while a recording is recalled that others may share: its key and codes
    num_written: int = 0  # frames whose codes are in the slot
    num_called: int = 0  # frames in calls, finished or not
    num_decoded: int = 0
    earliest_call_s: float = math.inf  # before then `call_size` is 0
    ready_since_s: float = math.inf  # when its next chunk could have been decoded
    _plan: ChunkPlan = field(init=False)

    def __post_init__(self) -> None:
        self._plan = ChunkPlan(GPU_RAMP, frame_s=self.frame_s, min_lead_s=_MIN_LEAD_S, in_hand=0.0)

    @property
    def num_waiting(self) -> int:
        return self.num_written - self.num_called

    @property
    def num_delivered(self) -> int:
        """Frames of the sequence whose audio its listener has, once nothing is left to recall."""
        return self.num_before + self.num_decoded - self.num_recalled

    @property
    def is_recalling(self) -> bool:
        return self.num_called < self.num_recalled

    @property
    def goes_last(self) -> bool:
        """Whether it waits until no other stream wants to be decoded: a background stream, while its slot has room."""
        return self.is_background and 2 * self.num_waiting < MAX_WAITING

    def deadline_s(self) -> float:
        if self.is_recalling and not self.is_background:
            return self.opened_s + _RECALL_PATIENCE_S
        return self.listener.deadline_s(self.opened_s)

    def awaits_first_sound(self, now_s: float) -> bool:
        """Whether its listener hears it soon. One that opened long ago may wait for text that is not written."""
        return not self.listener.has_begun and now_s - self.opened_s < _SHARE_WAIT_S

    def has_slack(self, now_s: float) -> bool:
        """Whether it may wait for others to share its call."""
        is_playing = not self.is_recalling and self.listener.has_begun and self.num_waiting < 2 * _CALL_SIZES[0]
        return (
            is_playing and self.listener.lead_s(now_s) >= _SHARING_LEAD_S and now_s - self.ready_since_s < _SHARE_WAIT_S
        )

    def call_size(self, now_s: float, load: int) -> int:
        """How many of the waiting frames its next call decodes; 0: it waits for more. `load` is that of `ChunkPlan`."""
        if self.is_recalling:
            return parts(min(self.num_waiting, self.num_recalled - self.num_called), _CALL_SIZES)[0]
        lead_s = self.listener.lead_s(now_s) + self._under_way_s
        ended = self.num_written == self.num_wanted
        return self._plan.size(self.num_waiting, ended=ended, lead_s=lead_s, load=load)

    def write(self, num_frames: int) -> None:
        """The slot has the codes of `num_frames` more frames."""
        self.num_written += num_frames
        self._replan()

    def enter_call(self, num_frames: int) -> None:
        """A call decodes its next frames; it may reach beyond the end."""
        if not self.is_recalling:
            self._plan.count()
        self.num_called = min(self.num_called + num_frames, self.num_written)
        self.ready_since_s = math.inf
        self._replan()

    def recall(self, num_frames: int) -> None:
        """Frames that the listener has heard are decoded again."""
        self.num_decoded += num_frames
        self._replan()

    def deliver(self, num_frames: int, now_s: float) -> None:
        """The audio of its next frames leaves now."""
        self.num_decoded += num_frames
        self.listener.deliver(num_frames * self.frame_s, now_s=now_s)
        self._replan()

    def drop_quiet(self, num_frames: int) -> None:
        """The audio of its next frames is quiet, and nothing was heard before: the ramp begins with the first sound."""
        self.num_decoded += num_frames
        self._plan.restart()
        self._replan()

    def finish(self) -> None:
        """No more frames are written."""
        self.num_wanted = self.num_written if self.num_written > self.num_recalled else 0
        self._replan()

    @property
    def _under_way_s(self) -> float:
        return (self.num_called - self.num_decoded) * self.frame_s

    def _replan(self) -> None:
        """Find out from when on `call_size` may be above 0."""
        if not self.num_waiting:
            self.earliest_call_s = math.inf
        elif self.is_recalling or self.num_written == self.num_wanted:
            self.earliest_call_s = -math.inf
        else:
            lead_s = self._plan.lead_to_decode_s(self.num_waiting) - self._under_way_s
            may_wait = self.listener.due_s is not None and lead_s < math.inf
            self.earliest_call_s = self.listener.deadline_s(0.0) - lead_s if may_wait else -math.inf
