"""Settings below `api.records`."""

from typing import Annotated

from pydantic import Field

from deployments.config import Strict


class RecordSettings(Strict):
    """Settings of usage counts and traces, which never contain texts (docs/records.md)."""

    usage: bool = True  # count usage by key, model, voice and dialect in the voice store
    # OTLP endpoint for OpenTelemetry spans, such as `http://collector:4318`. Requires the extra `tracing`.
    traces: str | None = None
    # Share of requests to sample. The `traceparent` of a client takes precedence.
    trace_share: Annotated[float, Field(ge=0, le=1)] = 1.0
