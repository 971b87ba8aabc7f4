import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from deployments.protocol import Marks
from serve_app.api.request_record import LEFT, RequestRecord, Usage
from serve_app.extensions.records.extension import record_keeper
from serve_app.extensions.records.request_lines import story_of
from serve_app.extensions.records.settings import RecordSettings
from serve_app.extensions.records.tracing import RequestSpans
from tests.loadtest.servers import QuietHandler, running

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MS = 1_000_000
MARKS: Marks = tuple(
    (stage, at * MS)
    for stage, at in {
        "received": 10, "request": 11, "to-codec": 12, "to-talker": 13, "to-engine": 14, "prompt": 15, "codes": 20,
        "audio": 22, "from-engine": 23, "from-talker": 24, "codec": 30, "response": 32,
    }.items()
)  # fmt: skip
TRAIL = (("Talker#1", 23 * MS), ("Codec#1", 30 * MS), ("TalkerLost", 50 * MS), ("Talker#2", 60 * MS))


def record(*, flags: str | None = None, error: str | None = None) -> RequestRecord:
    usage = Usage(
        frames=9, samples=9, first_audio_ns=31 * MS, marks=MARKS, trail=TRAIL, seed=2**60, model="m", voice="v"
    )
    trace = {} if flags is None else {"traceparent": f"00-{TRACE}-{SPAN}-{flags}", "tracestate": "their=own"}
    return RequestRecord(
        "mine", 10 * MS, method="POST", path="/v1/audio/speech", usage=usage, error=error, trace=trace, ended_ns=99 * MS
    )


def spans_of(each: RequestRecord, share: float = 0.0) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    spans = RequestSpans(exporter, share, replica="Ingress#1")
    spans.receive(each)
    spans.flush(is_last=True)
    return {span.name: span for span in exporter.get_finished_spans()}


def test_spans_are_made_of_marks_below_the_clients_own() -> None:
    each = record(flags="01")
    found = spans_of(each)
    ms = {name: (span.start_time // MS, span.end_time // MS) for name, span in found.items()}  # type: ignore[operator]
    assert ms == {
        "POST /v1/audio/speech": (10, 99),
        "codec": (12, 30),
        "talker": (13, 23),
        "engine": (14, 22),
        "speech": (31, 99),
        "TalkerLost": (50, 60),
    }
    names = {span.context.span_id: name for name, span in found.items() if span.context is not None}
    parents = {name: names.get(span.parent.span_id) for name, span in found.items() if span.parent is not None}
    own = "POST /v1/audio/speech"
    assert parents == {own: None, "codec": own, "talker": "codec", "engine": "talker", "speech": own, "TalkerLost": own}
    root = found[own]
    assert root.parent is not None
    assert (f"{root.parent.span_id:x}", f"{root.parent.trace_id:032x}") == (SPAN, TRACE)
    assert root.parent.trace_state.get("their") == "own"
    assert root.attributes is not None
    assert root.attributes.items() >= {"talkray.id": "mine", "talkray.seed": str(2**60), "talkray.codes": 9}.items()
    assert found["talker"].attributes == {"talkray.replica": "Talker#1"}
    assert found["TalkerLost"].attributes == {"talkray.replica": "Talker#2"}
    assert story_of(each)["trace_id"] == TRACE


def test_who_is_sampled() -> None:
    assert not spans_of(record(flags="00"), share=1.0), "the client says no"
    assert not spans_of(record(), share=0.0)
    drawn = record()
    assert len(spans_of(drawn, share=1.0)) == 6
    assert story_of(drawn)["trace_id"] not in (None, TRACE), "the line names the trace that was begun"


@pytest.mark.parametrize(("error", "is_ok"), [("engine_error", False), (LEFT, True)])
def test_an_error_is_the_spans_status(error: str, is_ok: bool) -> None:
    assert spans_of(record(error=error), share=1.0)["POST /v1/audio/speech"].status.is_ok is is_ok


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A collector's address, and what is posted to it."""
    posted: list[tuple[str, bytes]] = []

    class Collector(QuietHandler, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.answer(200, b"")

    with running(Collector) as url:
        yield url, posted


def test_a_collector_gets_them_and_the_file_its_line(tmp_path: Path) -> None:
    with collector() as (url, posted):
        keeper = record_keeper(RecordSettings(usage=False, traces=url), None, replica="Ingress#1", folder=tmp_path)
        keeper.receive(record())
        keeper.close()
    [(path, content)] = posted
    assert path == "/v1/traces"
    [file] = tmp_path.iterdir()
    assert file.name == "talkray_requests_Ingress_1.jsonl"
    assert file.stat().st_mode & 0o77 == 0
    assert bytes.fromhex(json.loads(file.read_text())["trace_id"]) in content
