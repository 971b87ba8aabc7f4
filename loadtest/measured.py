"""One replica's performance as a table with a few figures for each measured rate, usable without the traces.

`row` converts a measured run to a row of the table. `learn_rows` derives the simulator's model from the rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from loadtest.measure import Result
from loadtest.service_model import QUANTILES, Floats, ServiceModel, observe
from loadtest.tables import MS
from loadtest.traces import NoRunError

PERCENTS = (5, 25, 50, 75, 90, 95, 99)  # stored percentiles of the time to first audio
HELD = 0.98  # a replica keeps up with a rate if at least this share of the planned audio is on time


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """Measurements of one replica at one rate."""

    rate: float  # offered requests per second
    requests: int
    speech_s: float  # mean length of the responses
    first_audio_ms: Mapping[int, float]  # by percentile: from the planned arrival to the first audible sample
    streams: float  # mean number of streams in flight during a stream, including that stream
    frame_ms: float  # mean time between two frames of a stream
    in_time: float  # share of the planned audio that arrived on time
    refused: int = 0
    is_held_out: bool = False  # reserved for checking predictions; models do not learn from this row

    @property
    def audio_per_s(self) -> float:
        """Seconds of audio requested per second."""
        return self.rate * self.speech_s

    @property
    def is_carried(self) -> bool:
        """Whether the replica kept up: audio arrived in time, and no request was rejected."""
        return self.refused == 0 and self.in_time >= HELD

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Parse a row of a table. Raises `TypeError` or `ValueError` if fields are missing or invalid."""
        first = {int(percent): float(ms) for percent, ms in record["first_audio_ms"].items()}
        return cls(**{**record, "first_audio_ms": first})


def row(step: Result, *, is_held_out: bool = False) -> MeasuredRate:
    """Return the row of a measured rate. Raises `NoRunError` if all requests failed."""
    spoken = [trace.ttfa_s * MS for trace in step.measured if trace.ttfa_s is not None]
    observed = observe(step.measured)
    frames_s = [one.frame_s for one in observed if one.frame_s is not None]
    if not spoken or not frames_s:
        raise NoRunError(f"{step.title}: no response was long enough and audible, so the rate cannot be used for plans")
    summary = step.summary
    return MeasuredRate(
        rate=step.rate,
        requests=len(spoken),
        speech_s=round(summary.planned_audio_s / max(1, summary.sent), 2),
        first_audio_ms={percent: round(float(np.percentile(spoken, percent)), 1) for percent in PERCENTS},
        streams=round(float(np.mean([one.mean_streams for one in observed])), 2),
        frame_ms=round(float(np.mean(frames_s)) * MS, 3),
        in_time=round(summary.audio_in_time_share or 0.0, 4),
        refused=summary.refused,
        is_held_out=is_held_out,
    )


def learn_rows(rows: Sequence[MeasuredRate]) -> ServiceModel:
    """Learn the model of a replica. Ignores held-out rows. Raises `NoRunError` if there are no other rows.

    Between two rates, frame times are interpolated linearly by streams in flight. Times to first audio are interpolated
    geometrically, because a queue grows faster than the load.
    """
    taught = sorted((row for row in rows if not row.is_held_out), key=lambda row: row.streams)
    if not taught:
        raise NoRunError("the table has no rows to learn from")
    streams = np.array([row.streams for row in taught])
    heights = np.maximum.accumulate(np.array([row.frame_ms / MS for row in taught]))
    by_row = np.array([_quantiles(row) for row in taught])
    others = np.arange(int(np.ceil(streams[-1])), dtype=np.float64)
    first_s = np.exp(np.stack([np.interp(others + 1, streams, column) for column in np.log(by_row).T], axis=1))
    return ServiceModel(np.stack([streams, heights], axis=1), np.ones(1), first_s)


def _quantiles(row: MeasuredRate) -> Floats:
    """Return evenly spaced quantiles of the seconds to first audio, constant beyond the outermost known percentiles."""
    percents = sorted(row.first_audio_ms)
    known = [row.first_audio_ms[percent] / MS for percent in percents]
    wanted = 100 * (np.arange(QUANTILES) + 0.5) / QUANTILES
    return np.asarray(np.interp(wanted, percents, known), dtype=np.float64)
