"""How a server spent the time to its first byte, where it says so in a `Server-Timing` header.

Talkray does with `api.server_timing: true`: each entry with a `dur` is a stage, in order, and `received;desc="..."` is
when the request came in, in seconds of the time of day.
"""

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"\s*([\w-]+)((?:\s*;\s*\w+\s*=\s*(?:\"[^\"]*\"|[^;,]*))*)\s*(?:,|$)")
_PARAMETER = re.compile(r";\s*(\w+)\s*=\s*\"?([^\";,]*)\"?")
TO_SERVER, TO_CLIENT = "to-server", "to-client"


@dataclass(frozen=True, slots=True)
class ServerTiming:
    """What one answer's header says."""

    received_s: float | None  # time of day
    stages_s: dict[str, float]


def parse(header: str) -> ServerTiming:
    """Entries that say neither are left out."""
    received_s, stages_s = None, {}
    for name, rest in _ENTRY.findall(header):
        parameters = dict(_PARAMETER.findall(rest))
        try:
            if name == "received":
                received_s = float(parameters["desc"])
            else:
                stages_s[name] = float(parameters["dur"]) / 1000
        except (KeyError, ValueError):
            continue
    return ServerTiming(received_s, stages_s)


def stages(header: str, *, sent_at_s: float, ttfb_s: float) -> dict[str, float]:
    """Seconds of each stage. With a server whose clock agrees with ours, which sent at the time of day `sent_at_s`,
    also of the way there and back: then all stages together are `ttfb_s`.
    """
    timing = parse(header)
    inside_s = sum(timing.stages_s.values())
    there_s = -1.0 if timing.received_s is None else timing.received_s - sent_at_s
    if not timing.stages_s or not 0 <= there_s <= ttfb_s - inside_s:
        return timing.stages_s
    return {TO_SERVER: there_s, **timing.stages_s, TO_CLIENT: ttfb_s - inside_s - there_s}
