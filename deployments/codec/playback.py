"""When the listener of a stream needs its next audio."""

from dataclasses import dataclass


@dataclass(slots=True)
class PlaybackClock:
    """A player without a buffer that plays from the first delivery on. Times are seconds of one monotonic clock."""

    started_s: float | None = None  # first delivery
    audio_s: float = 0.0  # delivered so far

    def deliver(self, audio_s: float, *, now_s: float) -> None:
        """Count audio that leaves now."""
        if self.started_s is None:
            self.started_s = now_s
        self.audio_s += audio_s

    def deadline_s(self, now_s: float) -> float:
        """When the next sample is due: now, for a stream that has delivered nothing."""
        return now_s if self.started_s is None else self.started_s + self.audio_s

    def lead_s(self, now_s: float) -> float:
        """Audio that is delivered and not played yet; negative once the player has run dry."""
        return self.deadline_s(now_s) - now_s
