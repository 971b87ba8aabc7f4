"""The settings `api.records`."""

from typing import Annotated

from pydantic import Field

from deployments.config import Strict


class RecordSettings(Strict):
    """Usage counts and traces. Neither contains texts (docs/records.md)."""

    usage: bool = True  # counts usage by key, model, voice and dialect, in the voice store
    # OTLP endpoint for OpenTelemetry spans, such as `http://collector:4318`. Needs the extra `tracing`.
    traces: str | None = None
    # Share of requests to sample. A client's `traceparent` takes precedence.
    trace_share: Annotated[float, Field(ge=0, le=1)] = 1.0
