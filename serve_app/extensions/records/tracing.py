"""Create OpenTelemetry spans from a finished request's timestamps, without measuring anything else.

The parent of a request's span is the client's span, from `traceparent`. The request's span has these children:

    POST /v1/audio/speech           ingress: the whole request
      codec                         codec replica: until the first audio
        talker                      talker replica: until the first audio
          engine                    process of the engine: prompt, first codes, first audio
      speech                        time from the first audio to the end
      TalkerLost, CodecLost         time from a loss until the stream continues

Exporting spans requires the extra `tracing`. Tests use only packages that Ray Serve installs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from deployments.errors import StartError
from serve_app.api.request_record import RequestRecord
from serve_app.distribution import pip_install
from serve_app.extensions.records.request_lines import entry_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_OTLP_PATH = "/v1/traces"
# Name of each part, the mark at its start, and possible marks at its end. The last end mark recorded applies.
_PARTS = (
    ("codec", "to-codec", ("codec",)),
    ("talker", "to-talker", ("from-engine",)),
    ("engine", "to-engine", ("codes", "audio")),
)


@dataclass(frozen=True, slots=True)
class SpanPart:
    """Name, times and replica of a span."""

    name: str
    start_ns: int
    end_ns: int
    replica: str = ""
    is_nested: bool = False  # whether the previous part is the parent


def otlp_exporter(url: str) -> "SpanExporter":
    """Return an exporter that sends spans to a collector. Raises StartError if the extra `tracing` is missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        missing = pip_install("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
        raise StartError(f"api.records.traces: the exporter is not installed. Run {missing}") from error
    return OTLPSpanExporter(endpoint=url if urlsplit(url).path.strip("/") else url.rstrip("/") + _OTLP_PATH)


class RequestSpans:
    """Sink that creates spans for each sampled request. One of the SDK's threads sends them."""

    def __init__(self, exporter: "SpanExporter", share: float, *, replica: str) -> None:
        """Sample `share` of the requests that have no `traceparent`. A `traceparent` contains the client's decision."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        named = Resource.create({"service.name": "talkray", "service.instance.id": replica})
        self._provider = TracerProvider(ParentBasedTraceIdRatio(share), named, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("talkray")
        self._replica = replica

    def receive(self, record: RequestRecord) -> None:
        """Create the spans for a request. If it is sampled, set its `traceparent` to the new span."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        span = self._tracer.start_span(
            f"{record.method} {record.path}",
            propagator.extract(record.trace),
            SpanKind.SERVER,
            _attributes(record) | {"talkray.replica": self._replica},
            start_time=record.received_ns,
        )
        if span.is_recording():  # the request is sampled
            own = parent = set_span_in_context(span)
            record.trace = {}
            propagator.inject(record.trace, own)
            for part in parts_of(record):
                attributes = {"talkray.replica": part.replica} if part.replica else {}
                context = parent if part.is_nested else own
                child = self._tracer.start_span(part.name, context, attributes=attributes, start_time=part.start_ns)
                child.end(part.end_ns)
                parent = set_span_in_context(child)
            if record.is_failure:
                span.set_status(StatusCode.ERROR, record.error)
        span.end(record.ended_ns)

    def flush(self, *, is_last: bool) -> None:
        """Send the remaining spans on shutdown. The SDK sends all others every five seconds."""
        if is_last:
            self._provider.shutdown()


def parts_of(record: RequestRecord) -> Iterator[SpanPart]:
    """Yield a request's parts by start time. Each part before the first audio is nested in the previous part."""
    marks, trail = dict(record.usage.marks), record.usage.trail
    is_nested = False
    for name, first, last in _PARTS:
        end_ns = max((marks[stage] for stage in last if stage in marks), default=None)
        if first in marks and end_ns is not None:
            made_by = next((stage for stage, _ in trail if stage.lower().startswith(name)), "")
            yield SpanPart(name, marks[first], end_ns, made_by, is_nested)
            is_nested = True
    if record.usage.first_audio_ns is not None:
        yield SpanPart("speech", record.usage.first_audio_ns, record.ended_ns)
    for at, (stage, lost_ns) in enumerate(trail):
        if "#" not in stage:
            next_replica, on_ns = next((mark for mark in trail[at + 1 :] if "#" in mark[0]), ("", record.ended_ns))
            yield SpanPart(stage, lost_ns, on_ns, next_replica)


def _attributes(record: RequestRecord) -> dict[str, str | int | float]:
    entry = entry_of(record)
    names = ("id", "key", "dialect", "model", "voice", "characters", "codes", "audio_s", "outcome")
    attributes = {f"talkray.{name}": entry[name] for name in names if entry[name] is not None}
    return attributes | ({} if entry["seed"] is None else {"talkray.seed": str(entry["seed"])})
