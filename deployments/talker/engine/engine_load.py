"""What an engine tells of its load, to its replica. Imports no torch, as the replica does not."""

from dataclasses import dataclass, field

from deployments.recording_cache import Lookups


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine is busy with, and its counts."""

    num_running: int = 0
    num_waiting: int = 0
    kv_used_ratio: float = 0.0
    speakers: Lookups = field(default_factory=Lookups)  # of speaker vectors since the last report
    references: Lookups = field(default_factory=Lookups)  # of codes of recordings since the last report
    num_background: int = 0  # sequences of jobs, which count in neither of the numbers above
    repaired: int = 0  # streams so far whose audio came to NaN or infinity and was made again
