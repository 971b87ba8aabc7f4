"""Lines in request files: each one records a request and its outcome, without the text."""

import re
import time
from itertools import pairwise

from serve_app.api.request_record import LEFT, Entry, RequestRecord

_NO_ADDRESS = re.compile(r"[^0-9A-Za-z.:%_-]")  # a proxy in front of the server may forward any characters
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-")  # start of a `traceparent`


def entry_of(record: RequestRecord) -> Entry:
    """Return the line for a request, without its text."""
    first_ns = record.usage.first_audio_ns
    return {
        "time": _now(),
        "id": record.request_id,
        "method": _printable(record.method, most=16),
        "path": _printable(record.path, most=96),
        "dialect": record.dialect,
        "client": _NO_ADDRESS.sub("?", record.client)[:64],
        "key": None if record.key is None else _printable(record.key, most=64),
        "model": record.usage.model,
        "voice": record.usage.voice,
        "seed": record.usage.seed,
        "characters": record.characters,
        "codes": record.usage.frames,
        "audio_s": round(record.usage.samples / record.samples_per_s, 2),
        "ttfa_ms": None if first_ns is None else round((first_ns - record.received_ns) / 1e6),
        "took_ms": round((record.ended_ns - record.received_ns) / 1e6) if record.ended_ns else None,
        "outcome": record.error or record.usage.finish_reason or LEFT,
    }


def story_of(record: RequestRecord) -> Entry:
    """Return the entry with the times of all stages before the first audio, and the replicas that produced the audio.
    A replica loss is listed between the lost replica and its successor.
    """
    stages_ms = {
        stage: round((at_ns - before_ns) / 1e6, 2) for (_, before_ns), (stage, at_ns) in pairwise(record.usage.marks)
    }
    made_by: list[str] = []
    for stage, _ in record.usage.trail:
        if stage not in made_by or "#" not in stage:
            made_by.append(stage)
    trace = _TRACE.match(record.trace.get("traceparent", ""))
    return {**entry_of(record), "stages_ms": stages_ms, "replicas": made_by, "trace_id": trace and trace[1]}


def _printable(text: str, *, most: int) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:most])


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
