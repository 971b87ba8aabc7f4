"""Traffic for simulations: a steady rate, a daily pattern, or the schedule of a measured run."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from loadtest.arrivals import FRAMES_PER_S, SpeechLengths
from loadtest.measure import Result
from loadtest.service_model import Floats, Ints, ServiceModel
from loadtest.simulate import Cluster, NodeKind, Traffic
from loadtest.traces import LoadTestError
from serve_app.scaling.policies import CodecScaling, TalkerScaling

T = TypeVar("T")

SECTIONS: dict[str, type[Any]] = {
    "talker_scaling": TalkerScaling,
    "codec_scaling": CodecScaling,
    "talker_nodes": NodeKind,
    "codec_nodes": NodeKind,
}
NIGHT_SHARE = 0.2  # share of the peak rate at the quietest time of the day
STEPS_PER_STREAM = 4
MIN_STEP_S, MAX_STEP_S = 0.005, 0.5
HOUR_S, DAY_S = 3600.0, 86400.0
QUIETEST_S = 4 * 3600.0  # 4 a.m.
RATE_STEP_S = 60.0


def rate_at(shape: str, peak_rate: float, times_s: Floats, day_s: float = DAY_S) -> Floats:
    """Return the requests per second at each time of a day that lasts `day_s`."""
    if shape == "steady":
        return np.full(len(times_s), peak_rate)
    height = (1 - np.cos(2 * np.pi * (times_s / day_s - QUIETEST_S / DAY_S))) / 2
    return np.asarray(peak_rate * (NIGHT_SHARE + (1 - NIGHT_SHARE) * height), dtype=np.float64)


def draw_traffic(
    shape: str, peak_rate: float, *, duration_s: float, lengths: SpeechLengths, seed: int, day_s: float = DAY_S
) -> Traffic:
    """Draw Poisson arrivals with log-normal lengths, at a rate that changes every minute of a day.

    A day shorter than DAY_S goes through the same rates in less time.
    """
    generator, step_s = np.random.default_rng(seed), RATE_STEP_S * day_s / DAY_S
    starts_s = np.arange(0.0, duration_s, step_s)
    widths_s = np.minimum(step_s, duration_s - starts_s)
    counts = generator.poisson(rate_at(shape, peak_rate, starts_s, day_s) * widths_s)
    arrival_s = np.repeat(starts_s, counts) + generator.random(int(counts.sum())) * np.repeat(widths_s, counts)
    frames: Ints = np.array(lengths.draw(len(arrival_s), seed=seed), dtype=np.int64)
    return Traffic(np.sort(arrival_s), frames)


def planned_traffic(result: Result) -> Traffic:
    """Return the requests from a measured run, with its response lengths. Failed requests get the median length."""
    traces = result.traces
    spoken = [trace.audio_s for trace in traces if trace.failure is None]
    usual_s = float(np.median(spoken)) if spoken else 0.0
    lengths_s = [usual_s if trace.failure else trace.audio_s for trace in traces]
    return Traffic(
        np.array([trace.planned_s for trace in traces], dtype=np.float64),
        np.array([round(length_s * FRAMES_PER_S) for length_s in lengths_s], dtype=np.int64),
    )


class SettingsError(LoadTestError):
    """Raised if a settings file is invalid. The message contains the position of the error."""


def read_cluster(model: ServiceModel, file: Path | None, *, gpus: int) -> Cluster:
    """Read a cluster from YAML with the fields of `Cluster`. Policies have the same names as in `AppConfig`.

    `gpus` limits the talker pool. Raises a `SettingsError` that lists the unknown and the valid keys.
    """
    try:
        values = (yaml.safe_load(file.read_text(encoding="utf-8")) if file else None) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise SettingsError(f"{file} is not a mapping of settings")
    sections = {
        name: build(kind, values[name], where=f"{file}: {name}")
        for name, kind in SECTIONS.items()
        if values.get(name) is not None
    }
    talker = replace(sections.get("talker_scaling", TalkerScaling(sequences_per_replica=32)), max_replicas=gpus)
    settled = {"codec_scaling": None} | values | sections | {"talker_scaling": talker}
    return build(Cluster, settled, where=str(file), model=model)


def build(kind: type[T], values: Any, *, where: str, **given: Any) -> T:
    """Build a settings section from `values` and `given`. Raises `SettingsError`."""
    names = {field.name for field in fields(kind)} - given.keys()  # type: ignore[arg-type]
    if not isinstance(values, dict) or values.keys() - names:
        raise SettingsError(f"{where}: unknown keys in {values!r}; valid keys: {sorted(names)}")
    try:
        return kind(**given, **values)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{where}: {error}") from error


def usual_step_s(model: ServiceModel, traffic: Traffic) -> float:
    """Return a step much shorter than the streams. A step as long as a stream would double its slot usage."""
    usual_s = float(np.median(traffic.frames)) * float(model.frame_s(np.ones(1))[0]) if len(traffic.frames) else 1.0
    return float(np.clip(usual_s / STEPS_PER_STREAM, MIN_STEP_S, MAX_STEP_S))
