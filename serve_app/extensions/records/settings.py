"""The settings `api.records`."""

from typing import Annotated

from pydantic import Field

from deployments.config import Strict


class RecordSettings(Strict):
    """Records of requests besides their lines, and never their text (docs/command-line.md)."""

    usage: bool = True  # counts by key, model, voice and dialect in the store of voices: `talkray usage`
    # Where spans of OpenTelemetry go, by OTLP over HTTP: http://collector:4318/v1/traces. None: nowhere. Needs the
    # extra `tracing`. A client's `traceparent` decides whether its request is sampled, else this share of all is.
    traces: str | None = None
    trace_share: Annotated[float, Field(ge=0, le=1)] = 1.0
