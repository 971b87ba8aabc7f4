"""Autoscaling records of replicas for Serve's controller, which `serve_app.scaling.policies` reads.

The names are fields of `record_autoscaling_stats`. This module uses only the standard library, because the controller
imports it on a head node without torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TalkerRecord:
    """Load of one talker replica."""

    running: float = 0.0  # sequences in the batch
    waiting: float = 0.0  # sequences that wait for a row or for KV blocks
    kv_used_ratio: float = 0.0  # share of the KV blocks, 0 to 1
    background: float = 0.0  # sequences of jobs, not included in the other numbers


@dataclass(frozen=True, slots=True)
class CodecRecord:
    """Load of one codec replica."""

    streams: float = 0.0  # open streams, including those that still wait for the talker
    starting: float = 0.0  # streams that wait for the talker's first frame
    backlog_s: float = 0.0  # seconds of audio received as codes but not decoded yet
    busy_cores: float = 0.0  # busy decoder workers, as a moving mean
    cores: float = 1.0  # decoder workers
    background: float = 0.0  # streams of jobs, not included in the other numbers
