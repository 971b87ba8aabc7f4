"""Talkray's Prometheus metrics, and functions that record several of them at once.

Each replica process installs Ray's recorder once (`ray_metrics.py`). If there is none, records are dropped. Tests have
no recorder, and the talker's engine process sends its values to the replica instead (`Produced`).
"""

from collections.abc import Callable, Iterator, Sequence

from deployments.protocol import FinishReason
from deployments.recording_cache import Lookups

_LATENCIES_S = [0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 15.0, 60.0]
_STEPS_S = [0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.15, 0.3, 1.0]
_RATIOS = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5, 3.0]
_BATCHES = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256]
_POOL = ("pool",)
_REASON = ("reason",)
MODEL = "model"


class Instrument:
    """One Prometheus metric: a histogram if it has boundaries, a counter if it ends in `_total`, else a gauge.

    `record` takes a value, and tags as keywords. Each metric also has the tag MODEL, which is empty for a single
    model. If there are several models, a replica sets it when it installs Ray's instruments.
    """

    def __init__(
        self, name: str, description: str, boundaries: Sequence[float] = (), *, tags: tuple[str, ...] = ()
    ) -> None:
        self.name, self.description, self.boundaries, self.tags = name, description, boundaries, tags
        self.record: Callable[..., None] = lambda _value, **_tags: None


TTFB = Instrument("talkray_ttfb_seconds", "Time from the received request to the first sent byte.", _LATENCIES_S)
TTFP = Instrument("talkray_ttfp_seconds", "Time to the first PCM sample at the ingress.", _LATENCIES_S)
TTFA = Instrument(
    "talkray_ttfa_seconds", "Time to the first audible sample at the ingress.",
    _LATENCIES_S,
)  # fmt: skip
ONSET = Instrument(
    "talkray_onset_seconds", "Audio before the first audible sample: 10 ms above -50 dBFS.",
    [0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0],
)  # fmt: skip
STAGES = Instrument(
    "talkray_stage_seconds", "Duration of each stage before first audio.",
    _LATENCIES_S, tags=("stage",),
)  # fmt: skip
LATENESS = Instrument(
    "talkray_chunk_lateness_seconds", "Lateness of chunks for a player without a buffer; 0 is in time.",
    [0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0],
)  # fmt: skip
UNDERRUNS = Instrument("talkray_underruns_total", "Chunks that were late for a player without a buffer.")
STALLS = Instrument(
    "talkray_stall_seconds", "Total silence after the first audio of a stream, for a player without a buffer.",
    [0.001, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0],
)  # fmt: skip
AUDIO = Instrument("talkray_audio_seconds_total", "Seconds of audio that the ingress sent.")
RTF = Instrument(
    "talkray_rtf", "Processing time over audio time of complete streams; above 1 is slower than speech.", _RATIOS,
)  # fmt: skip
ENDINGS = Instrument("talkray_endings_total", "Finished streams, by finish_reason.", tags=_REASON)
REDRAWN = Instrument(
    "talkray_redrawn_total", "Speech that ended badly before it was sent and was generated again, by finish_reason.",
    tags=_REASON,
)  # fmt: skip
STREAMS = Instrument("talkray_ingress_streams", "Requests in progress or waiting at an ingress replica.")
ROOM = Instrument("talkray_ingress_used_ratio", "Share of api.admission.max_streams in use at an ingress replica.")
REFUSALS = Instrument("talkray_refusals_total", "Refused requests, by reason.", tags=_REASON)
FAILOVERS = Instrument("talkray_failovers_total", "Streams continued on another replica, by reason.", tags=_REASON)
FAILOVER_GAP = Instrument(
    "talkray_failover_gap_seconds", "Time from the loss of a replica to the next chunk from another one.",
    _LATENCIES_S, tags=_REASON,
)  # fmt: skip
QUEUE = Instrument("talkray_queue_depth", "Waiting work: sequences at a talker, chunks at a codec replica.", tags=_POOL)
BATCH = Instrument("talkray_batch_size", "Sequences in a talker step, chunks in a codec call.", _BATCHES, tags=_POOL)
STEP = Instrument("talkray_step_seconds", "Duration of a talker step or a codec call.", _STEPS_S, tags=_POOL)
KV_USED = Instrument("talkray_kv_blocks_used_ratio", "Share of KV blocks in use at a talker.")
PRECISION = Instrument(
    "talkray_codec_precision", "1 for the precision in which a replica decodes.", tags=(*_POOL, "precision"),
)  # fmt: skip
REPAIRS = Instrument(
    "talkray_codec_repairs_total", "Chunks with NaN or infinity that were decoded again in float32.", tags=_POOL,
)  # fmt: skip
CODEC_LAG = Instrument(
    "talkray_codec_lag_seconds", "Seconds of audio that a codec replica has received as codes and not yet decoded.",
)  # fmt: skip
DECODED = Instrument(
    "talkray_decoded_seconds_total", "Seconds of audio that codec replicas sent, by the pool that decoded it.",
    tags=_POOL,
)  # fmt: skip
RECORDINGS = Instrument(
    "talkray_reference_lookups_total", "Lookups of recordings to clone, by requested part and whether it was cached.",
    tags=("wanted", "known"),
)  # fmt: skip
_USER = ("key", "voice", "dialect")
USED = {
    "requests": Instrument("talkray_usage_requests_total", "Requests that got audio.", tags=_USER),
    "characters": Instrument("talkray_usage_characters_total", "Characters of these requests.", tags=_USER),
    "audio_s": Instrument("talkray_usage_audio_seconds_total", "Seconds of audio of these requests.", tags=_USER),
    "codes": Instrument("talkray_usage_codes_total", "Frames of audio of these requests.", tags=_USER),
    "refused": Instrument("talkray_usage_refused_total", "Refused requests.", tags=_USER),
    "failed": Instrument("talkray_usage_failed_total", "Failed requests, including invalid ones.", tags=_USER),
}
WANTED = Instrument("talkray_replicas_wanted", "Replicas that Serve wants, running or starting.", tags=_POOL)
RUNNING = Instrument("talkray_replicas_running", "Replicas that take requests.", tags=_POOL)
DIED = Instrument(
    "talkray_replicas_died", "Replicas and proxies that ended unexpectedly. pool is proxy for proxies.", tags=_POOL,
)  # fmt: skip

INSTRUMENTS = (*(value for value in list(globals().values()) if isinstance(value, Instrument)), *USED.values())

_REFUSED = ("streams", "pauses", "line", "late", "starting", "stage")  # reasons that depend on one model's limits
_REFUSED_AT_THE_DOOR = ("key", "client", "uploads", "whole", "invalid_api_key", "forbidden", "headers_too_large")


def zeros(pool: str, models: Sequence[str]) -> Iterator[tuple[Instrument, dict[str, str]]]:
    """Yield the counters that a pool's replicas increment, with their tags, so that they can be initialized to zero.

    Prometheus misses an increase if a series does not start at zero, and panels for missing series are empty.
    """
    for model in models if pool == "ingress" else ():
        of = {MODEL: model}
        yield from ((instrument, of) for instrument in (UNDERRUNS, AUDIO))
        yield from ((ENDINGS, {**of, "reason": reason}) for reason in FinishReason)
        yield from ((REDRAWN, {**of, "reason": reason}) for reason in FinishReason if not reason.is_good)
        yield from ((REFUSALS, {**of, "reason": reason}) for reason in _REFUSED)
    if pool == "ingress":
        yield from ((REFUSALS, {"reason": reason}) for reason in _REFUSED_AT_THE_DOOR)
    lost, wanted = {
        "ingress": (("CodecLost", "TalkerLost"), ["prompt"]),
        "codec": (("TalkerLost",), ["codes"]),
        "talker": ((), ["codes", "speaker"]),
    }[pool]
    yield from ((FAILOVERS, {"reason": reason}) for reason in lost)
    yield from ((RECORDINGS, {"wanted": name, "known": known}) for name in wanted for known in ("yes", "no"))
    if pool != "ingress":
        yield REPAIRS, {"pool": pool}
    if pool == "codec":
        yield from ((DECODED, {"pool": decoder}) for decoder in ("talker", "codec"))


def record_chunk(audio_s: float, *, late_s: float, model: str = "") -> None:
    """Record a chunk that is sent now. `late_s` is the time since the listener's player ran dry, 0.0 if on time."""
    LATENESS.record(late_s, model=model)
    if late_s:
        UNDERRUNS.record(1, model=model)
    AUDIO.record(audio_s, model=model)


def record_stream(elapsed_s: float, *, audio_s: float, reason: FinishReason | None, model: str = "") -> None:
    """Record a complete stream, and why it ended if `reason` is known."""
    if reason is not None:
        ENDINGS.record(1, reason=reason, model=model)
    if audio_s:
        RTF.record(elapsed_s / audio_s, model=model)


def record_talker_step(step_s: float, batch_size: int, kv_used_ratio: float, *, waiting: int) -> None:
    """Record one step of a talker engine with `batch_size` frames. An idle engine records only its queue and cache."""
    if batch_size:
        STEP.record(step_s, pool="talker")
        BATCH.record(batch_size, pool="talker")
    KV_USED.record(kv_used_ratio)
    QUEUE.record(waiting, pool="talker")


def record_codec_call(call_s: float, batch_size: int, *, waiting: int, lag_s: float) -> None:
    """Record one decode call, and the tasks waiting during the call."""
    STEP.record(call_s, pool="codec")
    BATCH.record(batch_size, pool="codec")
    QUEUE.record(waiting, pool="codec")
    CODEC_LAG.record(lag_s)


def record_recording_lookups(wanted: str, lookups: Lookups) -> None:
    """Record cache lookups for reference recordings."""
    RECORDINGS.record(lookups.hits, wanted=wanted, known="yes")
    RECORDINGS.record(lookups.misses, wanted=wanted, known="no")
