"""Limits and names of the HTTP and WebSocket surface."""

from typing import Annotated

from pydantic import Field

from deployments.config import Strict

Positive = Annotated[int, Field(ge=1)]


class ApiSettings(Strict):
    """What a client may send, and under which names it may ask for the loaded model."""

    max_body_bytes: Positive = 16 << 20  # an HTTP body, and a WebSocket message with reference audio
    max_message_bytes: Positive = 128 << 10  # a WebSocket message without reference audio
    max_input_chars: Positive = 4096  # each of input, instructions and ref_text
    max_reference_bytes: Positive = 10 << 20  # of the audio file, before base64
    min_reference_seconds: Annotated[float, Field(gt=0)] = 0.5
    max_reference_seconds: Annotated[float, Field(gt=0)] = 30.0
    model_aliases: tuple[str, ...] = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts", "qwen3-tts")
