"""A clock that tests set."""


class Clock:
    """Stands in for a module's `time`."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        return self.now_s
