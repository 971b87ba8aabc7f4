"""Whole answers: audio that is kept until it is complete, in bounded memory, and sent with its length or in JSON."""

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

# Bytes of one whole answer, which is kept until its audio is complete: 23 minutes at 24 kHz, 16 bits.
MAX_WHOLE_BYTES = 64 << 20
# Bytes of all whole answers of this process; one client has half of them at most. The process then has 1 GB.
MAX_ALL_WHOLE_BYTES = 256 << 20
PART_BYTES = 96 << 10  # of one ASGI message; a multiple of 3, so that the base64 of parts joins without padding
AUDIO_HERE = "audio-in-base64"  # the place of the audio in an object: see `object_with`


class ByteQuota:
    """Counts the bytes of one whole answer while they are held. Leaving the context gives them back."""

    _room: ClassVar[FairShare] = FairShare(MAX_ALL_WHOLE_BYTES)

    def __init__(self, caller: str) -> None:
        """`caller` is the client's name."""
        self._caller = caller
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.hold(0)

    def hold(self, num_bytes: int) -> None:
        """From now on `num_bytes` are held. Raises PayloadTooLarge, and Overloaded if no room is left."""
        if num_bytes > MAX_WHOLE_BYTES:
            raise PayloadTooLarge(f"A response has at most {MAX_WHOLE_BYTES} bytes of audio; {_REMEDY}.", "stream")
        if num_bytes <= self._num_bytes:
            self._room.give_back(self._caller, self._num_bytes - num_bytes)
        elif not self._room.claim(self._caller, num_bytes - self._num_bytes):
            metrics.REFUSALS.record(1, reason="whole")
            raise Overloaded(f"Complete responses use all their memory now; {_REMEDY}.")
        self._num_bytes = num_bytes

    def expect(self, body: SpeechBody, delivery: Delivery, info: ModelInfo) -> None:
        """Raises as `hold` does, before any speech, if no room is left or the audio is sure to be too large."""
        if body.ignore_eos and body.sampling.max_new_tokens is not None:
            samples = (body.sampling.max_new_tokens - 1) * info.frame_samples * delivery.rate(info) / info.sample_rate
            if (num_bytes := int(samples / delivery.speed * kept_bytes(delivery.audio_format))) > MAX_WHOLE_BYTES:
                message = f"max_new_tokens: with ignore_eos the audio has {num_bytes} bytes, a whole answer at most"
                raise PayloadTooLarge(f"{message} {MAX_WHOLE_BYTES}; {_REMEDY}.", "max_new_tokens")
        self.hold(1)  # raises if not even a first byte may be kept now
        self.hold(0)


_REMEDY = "ask for a stream, or for less"


async def collected(parts: AsyncGenerator[bytes, None], quota: ByteQuota, *, beside: int = 0) -> bytes:
    """All of a body, which is closed also after an error; `beside` bytes count too. Raises as `ByteQuota.hold` does."""
    content = bytearray()
    async with aclosing(parts):
        async for part in parts:
            content += part
            quota.hold(beside + len(content))
    return bytes(content)


def object_with(fields: Mapping[str, object], audio: bytes) -> Iterator[bytes]:
    """The JSON object `fields`, in parts, with the audio in base64 where its first AUDIO_HERE stands."""
    before, _, after = json.dumps(fields).partition(AUDIO_HERE)
    yield before.encode()
    for part in parts_of(audio):
        yield base64.b64encode(part)
    yield after.encode()


def parts_of(content: bytes) -> Iterator[bytes]:
    """`content` in parts, because the connection to a slow reader buffers one message."""
    return (content[start : start + PART_BYTES] for start in range(0, len(content), PART_BYTES))
