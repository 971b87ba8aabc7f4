"""Autoscaling records that replicas send to Serve's controller, where `serve_app.scaling.policies` reads them.

The names are fields of `record_autoscaling_stats`. This module uses only the standard library, because the controller
imports it on a head node without torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TalkerRecord:
    """Load of one talker replica."""

    running: float = 0.0  # sequences in the batch
    waiting: float = 0.0  # sequences waiting for a row or for KV blocks
    kv_used_ratio: float = 0.0  # share of the KV blocks, 0 to 1
    background: float = 0.0  # job sequences, not included in the other numbers


@dataclass(frozen=True, slots=True)
class CodecRecord:
    """Load of one codec replica."""

    streams: float = 0.0  # open streams, including those still waiting for the talker
    starting: float = 0.0  # streams waiting for the talker's first frame
    backlog_s: float = 0.0  # seconds of audio received as codes but not decoded yet
    busy_cores: float = 0.0  # busy decoder workers, as a moving mean
    cores: float = 1.0  # decoder workers
    background: float = 0.0  # job streams, not included in the other numbers
