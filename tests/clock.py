"""A clock that tests set."""


class Clock:
    """Stands in for a module's `time`, or for `time.monotonic`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        return self.now_s

    __call__ = monotonic
