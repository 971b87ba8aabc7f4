import time
from pathlib import Path

from serve_app.extension import Extension, OpenContext
from serve_app.extensions.records.record_keeper import RecordKeeper, RecordSink, RequestLines
from serve_app.extensions.records.settings import RecordSettings
from serve_app.extensions.records.tracing import RequestSpans, otlp_exporter
from serve_app.extensions.records.usage_counts import UsageBook
from serve_app.extensions.voices.library import Voices
from serve_app.extensions.voices.voice_store import VoiceStore


def record_keeper(settings: RecordSettings, store: VoiceStore | None, *, replica: str, folder: Path) -> RecordKeeper:
    """Create the record keeper of one `replica`, which writes log lines to `folder`. Raises StartError."""
    sinks: list[RecordSink] = []
    if settings.traces is not None:  # the first sink, because the log line contains the trace ID
        sinks.append(RequestSpans(otlp_exporter(settings.traces), settings.trace_share, replica=replica))
    sinks.append(RequestLines(folder, replica))
    if settings.usage:
        sinks.append(UsageBook(store, time.time))
    return RecordKeeper(sinks)


def open_records(context: OpenContext) -> RecordKeeper | None:
    """Open the record keeper, or return None outside a replica, such as in tests."""
    node, voices = context.node, context.opened["voices"]
    if node is None or node.log_folder is None:
        return None
    assert isinstance(voices, Voices)
    return record_keeper(
        context.settings.of(RecordSettings), voices.store, replica=node.replica, folder=node.log_folder
    )


EXTENSION = Extension("records", settings=RecordSettings, requires=("voices",), open=open_records)
