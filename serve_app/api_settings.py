"""Limits and names of the HTTP and WebSocket surface."""

from typing import Annotated

from pydantic import Field

from deployments.config import Strict

Positive = Annotated[int, Field(ge=1)]


class AdmissionSettings(Strict):
    """What one ingress replica takes on. Beyond it, requests are refused with 429 and told when to come back."""

    max_streams: Positive = 256  # that are spoken or wait, below the pool's max_ongoing_requests
    # In front of the pools, on top of what a first audio takes anyway. While the eldest waits longer, nobody may join.
    max_line_s: Annotated[float, Field(gt=0)] = 0.25
    max_wait_s: Annotated[float, Field(gt=0)] = 5.0  # for the first audio: what would come later is refused
    start_wait_s: Annotated[float, Field(gt=0)] = 30.0  # the same while no talker runs; then it is a 503
    client_streams: Positive | None = None  # open at once from one address
    client_requests_per_minute: Annotated[float, Field(gt=0)] | None = None  # from one address, in bursts of as many
    # Proxies in front that add the address they see to X-Forwarded-For. 0: the header is not believed. Ray's HAProxy
    # adds none, and every client behind it has one and the same address.
    trusted_proxies: Annotated[int, Field(ge=0)] = 0


class ApiSettings(Strict):
    """What a client may send, and under which names it may ask for the loaded model."""

    admission: AdmissionSettings = AdmissionSettings()
    max_body_bytes: Positive = 16 << 20  # an HTTP body, and a WebSocket message with reference audio
    max_message_bytes: Positive = 128 << 10  # a WebSocket message without reference audio
    max_input_chars: Positive = 4096  # each of input, instructions and ref_text
    max_reference_bytes: Positive = 10 << 20  # of the audio file, before base64
    min_reference_seconds: Annotated[float, Field(gt=0)] = 0.5
    max_reference_seconds: Annotated[float, Field(gt=0)] = 30.0
    model_aliases: tuple[str, ...] = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts", "qwen3-tts")
