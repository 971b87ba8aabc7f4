"""Complete responses, collected in bounded memory and sent with a Content-Length or as JSON."""

import base64
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import ClassVar, Self

from deployments.errors import Overloaded, PayloadTooLarge
from deployments.protocol import ModelInfo
from deployments.serving import metrics
from serve_app.api.access.callers import FairShare
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.resolve.speech_request import Delivery
from serve_app.audio.formats import kept_bytes

# Maximum bytes of one complete response, 23 minutes at 24 kHz and 16 bits.
MAX_WHOLE_BYTES = 64 << 20
# Maximum bytes of all complete responses of this process, of which one client may use half. At that size the process
# needs 1 GB.
MAX_ALL_WHOLE_BYTES = 256 << 20
PART_BYTES = 96 << 10  # of one ASGI message; a multiple of 3, so the base64 of consecutive parts needs no padding
AUDIO_HERE = "audio-in-base64"  # placeholder for the audio in a JSON object: see `object_with`


class ByteQuota:
    """Counts the bytes that one complete response holds in memory. Exiting the context releases them."""

    _room: ClassVar[FairShare] = FairShare(MAX_ALL_WHOLE_BYTES)

    def __init__(self, caller: str) -> None:
        """Create the quota for the client named `caller`."""
        self._caller = caller
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.hold(0)

    def hold(self, num_bytes: int) -> None:
        """Set the number of bytes in memory. Raises PayloadTooLarge, or Overloaded if too many bytes are in use."""
        if num_bytes > MAX_WHOLE_BYTES:
            raise PayloadTooLarge(f"The audio has more than {MAX_WHOLE_BYTES} bytes; {_REMEDY}.", "stream")
        if num_bytes <= self._num_bytes:
            self._room.release(self._caller, self._num_bytes - num_bytes)
        elif not self._room.claim(self._caller, num_bytes - self._num_bytes):
            metrics.REFUSALS.record(1, reason="whole")
            raise Overloaded(f"The memory for complete responses is exhausted; {_REMEDY}.")
        self._num_bytes = num_bytes

    def expect(self, body: SpeechBody, delivery: Delivery, info: ModelInfo) -> None:
        """Raise the errors of `hold` before synthesis, if memory is exhausted or the audio would exceed the limit."""
        if body.ignore_eos and body.sampling.max_new_tokens is not None:
            samples = (body.sampling.max_new_tokens - 1) * info.frame_samples * delivery.rate(info) / info.sample_rate
            if (num_bytes := int(samples / delivery.speed * kept_bytes(delivery.audio_format))) > MAX_WHOLE_BYTES:
                message = f"max_new_tokens: ignore_eos would make {num_bytes} bytes of audio; the limit is"
                raise PayloadTooLarge(f"{message} {MAX_WHOLE_BYTES}; {_REMEDY}.", "max_new_tokens")
        self.hold(1)  # raises if not even one byte of memory is left
        self.hold(0)


_REMEDY = "set stream to true, or shorten the input"


async def read_all(parts: AsyncGenerator[bytes, None], quota: ByteQuota, *, beside: int = 0) -> bytes:
    """Return the complete body and close it. `beside` more bytes count. Raises the errors of `ByteQuota.hold`."""
    content = bytearray()
    async with aclosing(parts):
        async for part in parts:
            content += part
            quota.hold(beside + len(content))
    return bytes(content)


def object_with(fields: Mapping[str, object], audio: bytes) -> Iterator[bytes]:
    """Yield the JSON object `fields` in parts, with base64 audio in place of the first AUDIO_HERE."""
    before, _, after = json.dumps(fields).partition(AUDIO_HERE)
    yield before.encode()
    for part in parts_of(audio):
        yield base64.b64encode(part)
    yield after.encode()


def parts_of(content: bytes) -> Iterator[bytes]:
    """Split `content` into parts, because a slow client's connection buffers an entire message."""
    return (content[start : start + PART_BYTES] for start in range(0, len(content), PART_BYTES))
