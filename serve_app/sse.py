"""Server-sent events of a speech stream, as OpenAI names them."""

import base64
import json

from serve_app.errors import ErrorReply


def delta(audio: bytes) -> bytes:
    """The next bytes of the audio."""
    return b'data: {"type":"speech.audio.delta","audio":"' + base64.b64encode(audio) + b'"}\n\n'


def done(input_tokens: int, output_tokens: int) -> bytes:
    """The end of a complete stream; an output token is one codec frame."""
    usage = {"input_tokens": input_tokens, "output_tokens": output_tokens, "total_tokens": input_tokens + output_tokens}
    return _event({"type": "speech.audio.done", "usage": usage})


def failed(reply: ErrorReply) -> bytes:
    """The end of a stream that broke after it had begun."""
    return _event({"type": "speech.audio.error", **reply.envelope()})


def _event(fields: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"
