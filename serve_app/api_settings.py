"""Limits and names of the HTTP and WebSocket surface."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from deployments.config import Strict

Positive = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0)]


class AccessSettings(Strict):
    """Who may use the surface. Without a key file only a server that listens on a loopback address starts."""

    keys_file: Path | None = None  # `talkray key create` writes it; must be on every node with an ingress replica
    # Web pages that may use the API, such as https://app.example.com; "*" is every page. None besides our own.
    allowed_origins: tuple[str, ...] = ()
    # Names under which clients reach the server. None: any, or without keys the loopback ones, so that no web page
    # gets here through a domain of its own that resolves to this machine.
    allowed_hosts: tuple[str, ...] | None = None


class AdmissionSettings(Strict):
    """What one ingress replica takes on. Beyond it, requests are refused with 429 and told when to come back."""

    max_streams: Positive = 256  # that are spoken or wait, below the pool's max_ongoing_requests
    # In front of the pools, on top of what a first audio takes anyway. While the eldest waits longer, nobody may join.
    max_line_s: Annotated[float, Field(gt=0)] = 0.25
    # Where listeners hear more silence than this in all, too many streams are open: fewer are let in from then on.
    max_late_s: Annotated[float, Field(gt=0)] = 0.25
    min_streams: Positive = 4  # are let in, however late they come
    max_wait_s: Annotated[float, Field(gt=0)] = 5.0  # for the first audio: what would come later is refused
    start_wait_s: Annotated[float, Field(gt=0)] = 30.0  # the same while no talker runs; then it is a 503
    client_streams: Positive | None = None  # open at once from one address
    client_requests_per_minute: Annotated[float, Field(gt=0)] | None = None  # from one address, in bursts of as many
    # Proxies that add the address they see to X-Forwarded-For: HAProxy under `guarded-haproxy`, and each one in
    # front of that. With 0 the header is not believed, and all clients have HAProxy's own address.
    trusted_proxies: Annotated[int, Field(ge=0)] = 1


class ApiSettings(Strict):
    """What a client may send, and under which names it may ask for the loaded model."""

    access: AccessSettings = AccessSettings()
    admission: AdmissionSettings = AdmissionSettings()
    server_timing: bool = False  # responses say in a Server-Timing header how the time to first audio was spent
    max_header_bytes: Positive = 16 << 10  # all header lines together; HAProxy refuses more than about 15,000 bytes
    max_body_bytes: Positive = 16 << 20  # an HTTP body, and a WebSocket message with reference audio
    body_timeout_s: PositiveSeconds = 30.0  # for a whole HTTP body to arrive
    max_message_bytes: Positive = 128 << 10  # a WebSocket message without reference audio
    idle_timeout_s: PositiveSeconds = 600.0  # of a WebSocket that neither speaks nor is told anything
    max_input_chars: Positive = 4096  # each of input, instructions and ref_text
    max_reference_bytes: Positive = 10 << 20  # of the audio file, before base64
    min_reference_seconds: PositiveSeconds = 0.5
    max_reference_seconds: PositiveSeconds = 30.0
    reference_timeout_s: PositiveSeconds = 10.0  # for decoding the audio file
    model_aliases: tuple[str, ...] = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts", "qwen3-tts")
