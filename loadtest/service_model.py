"""Model of how a server's latency depends on the streams in flight, learned only from a sweep's client traces."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from loadtest.arrivals import FRAMES_PER_S
from loadtest.traces import NoRunError, Trace

MIN_SAMPLES = 40  # TTFB samples per number of streams; levels borrow samples from neighbours to reach this number
MIN_FRAMES = 4  # minimum length of streams used to measure speed, because shorter streams have only one or two chunks
KNOTS = 6
QUANTILES = 256  # quantiles per level, which are faster to draw from than samples

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Observed:
    """The latencies of one successful request, and the load when it arrived."""

    others_at_start: int  # streams in flight when the request was sent
    mean_streams: float  # mean streams in flight during the response, including this stream
    ttfb_s: float
    frames: int
    frame_s: float | None  # between first byte and end, per frame after the first; None for short streams


@dataclass(frozen=True, slots=True, eq=False)
class ServiceModel:
    """Model of one replica whose streams share its speed: each additional stream makes frames slower.

    `frame_s` rises along `knots` (streams, seconds per frame) and is extrapolated beyond them. `frame_factors` scale
    the frame times of single streams. TTFB is drawn from measurements with the same number of other streams.
    """

    knots: Floats  # [K, 2]
    frame_factors: Floats
    ttfb_s: Floats  # [levels, Q], quantiles by number of other streams in flight

    @classmethod
    def learn(cls, observed: Sequence[Observed]) -> Self:
        """Learn the model from observations. Raises `NoRunError` if there are too few observations."""
        timed = [one for one in observed if one.frame_s is not None]
        if len(timed) < MIN_SAMPLES:
            raise NoRunError(
                f"{len(timed)} successful requests have more than {MIN_FRAMES} frames, too few to learn from. At least "
                f"{MIN_SAMPLES} at several rates are needed. Run a longer sweep."
            )
        streams = np.array([one.mean_streams for one in timed])
        frame_s = np.array([one.frame_s for one in timed], dtype=np.float64)
        knots = rising_knots(streams, frame_s)
        factors = frame_s / interpolate(knots, streams)
        return cls(knots, factors, pooled_ttfb(observed))

    def frame_s(self, streams: Floats) -> Floats:
        """Return the seconds between two frames of each stream on a replica with `streams` streams."""
        return interpolate(self.knots, streams)

    def draw_ttfb(self, others: Ints, generator: np.random.Generator) -> Floats:
        """Draw the seconds to first byte for requests whose replica already has `others` streams.

        Beyond the measured range, the last samples are scaled in proportion to the frame time.
        """
        levels, quantiles = self.ttfb_s.shape
        measured = np.minimum(others, levels - 1)
        drawn: Floats = self.ttfb_s[measured, generator.integers(0, quantiles, size=len(others))]
        if not (others > measured).any():
            return drawn
        drawn *= self.frame_s((others + 1).astype(np.float64)) / self.frame_s((measured + 1).astype(np.float64))
        return drawn


def observe(traces: Sequence[Trace]) -> list[Observed]:
    """Return the measurements of the successful requests of one run."""
    times, counts = in_flight(traces)
    areas = np.concatenate([[0.0], np.cumsum(np.diff(times) * counts[:-1])]) if len(times) else np.zeros(0)

    def mean_streams(start_s: float, end_s: float) -> float:
        return float(np.interp(end_s, times, areas) - np.interp(start_s, times, areas)) / max(end_s - start_s, 1e-9)

    observed = []
    for trace in traces:
        if trace.failure is not None or trace.first_byte_s is None:
            continue
        before = int(np.searchsorted(times, trace.sent_s, side="left")) - 1
        frames = round(trace.audio_s * FRAMES_PER_S)
        observed.append(
            Observed(
                others_at_start=int(counts[before]) if before >= 0 else 0,
                mean_streams=mean_streams(trace.first_byte_s, trace.finished_s),
                ttfb_s=trace.first_byte_s - trace.sent_s,
                frames=frames,
                frame_s=(trace.finished_s - trace.first_byte_s) / (frames - 1) if frames >= MIN_FRAMES else None,
            )
        )
    return observed


def in_flight(traces: Sequence[Trace]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the times at which the number of requests in flight changed, and the number after each change."""
    steps = sorted([(trace.sent_s, 1) for trace in traces] + [(trace.finished_s, -1) for trace in traces])
    times, changes = ([time for time, _ in steps], [change for _, change in steps])
    return np.array(times), np.cumsum(np.array(changes, dtype=np.int64))


def rising_knots(streams: Floats, frame_s: Floats) -> Floats:
    """Average equal numbers of observations, ordered by streams, and make the averages non-decreasing."""
    order = np.argsort(streams)
    groups = [group for group in np.array_split(order, KNOTS) if len(group)]
    centres = np.array([streams[group].mean() for group in groups])
    heights = np.maximum.accumulate(np.array([frame_s[group].mean() for group in groups]))
    keep = np.concatenate([[True], np.diff(centres) > 1e-6])
    return np.stack([centres[keep], heights[keep]], axis=1)


def interpolate(knots: Floats, streams: Floats) -> Floats:
    """Interpolate at `streams`: constant before the first knot, and with the overall slope after the last knot."""
    centres, heights = knots.T
    slope = (heights[-1] - heights[0]) / (centres[-1] - centres[0]) if len(knots) > 1 else 0.0
    beyond = np.maximum(0.0, streams - centres[-1])
    return np.asarray(np.interp(streams, centres, heights) + beyond * slope, dtype=np.float64)


def pooled_ttfb(observed: Sequence[Observed]) -> Floats:
    """Return TTFB quantiles by number of other streams.

    Each level borrows samples from its neighbours until it has MIN_SAMPLES. A linear fit over all samples rescales them
    to the level. Without rescaling, levels with many samples would bias their neighbours.
    """
    others = np.array([one.others_at_start for one in observed], dtype=np.float64)
    ttfb_s = np.array([one.ttfb_s for one in observed])
    slope = max(0.0, float(np.polyfit(others, ttfb_s, 1)[0])) if np.ptp(others) else 0.0  # least-squares slope
    start = ttfb_s.mean() - slope * others.mean()
    ratios = ttfb_s / (start + slope * others)
    levels = []
    for level in range(int(others.max()) + 1):
        distance = np.abs(others - level)
        reach = np.sort(distance)[min(MIN_SAMPLES, len(distance)) - 1]
        pooled = ratios[distance <= reach] * (start + slope * level)
        levels.append(np.quantile(pooled, (np.arange(QUANTILES) + 0.5) / QUANTILES))
    return np.array(levels)
