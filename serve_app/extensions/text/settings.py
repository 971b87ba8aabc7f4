"""The settings `api.text`."""

from typing import Annotated

from pydantic import Field

from deployments.config import Strict
from serve_app.config import LEAST_SEGMENT_CHARS, Markup


class TextSettings(Strict):
    """How a text is read where its request does not say (docs/text.md)."""

    markup: Markup = "auto"
    paragraph_pause_s: Annotated[float, Field(ge=0, le=10)] = 0.6  # of silence; 0: a paragraph ends like a sentence
    max_segment_chars: Annotated[int, Field(ge=LEAST_SEGMENT_CHARS)] | None = None  # of a long text; None: the model's
