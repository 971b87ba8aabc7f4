"""Records of replicas for Serve's controller: fields of `record_autoscaling_stats`, read by
`serve_app.scaling.policies`.

Standard library only: the controller imports it, on a head node without torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TalkerRecord:
    """The record of one talker replica."""

    running: float = 0.0  # sequences in the batch
    waiting: float = 0.0  # sequences that wait for a row or for KV blocks
    kv_used_ratio: float = 0.0  # share of the KV blocks, 0 to 1
    background: float = 0.0  # sequences of jobs, not included in these numbers


@dataclass(frozen=True, slots=True)
class CodecRecord:
    """The record of one codec replica."""

    streams: float = 0.0  # open, including streams that still wait for the talker
    starting: float = 0.0  # streams whose first frame the talker has not made yet
    backlog_s: float = 0.0  # seconds of audio that are codes and not yet PCM
    busy_cores: float = 0.0  # busy decoder workers, as a moving mean
    cores: float = 1.0  # decoder workers
    background: float = 0.0  # streams of jobs, not included in these numbers
