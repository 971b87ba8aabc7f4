"""Encoding of streamed audio as events, for dialects with a format of their own."""

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing


def named_event(fields: Mapping[str, object]) -> bytes:
    """Encode an event whose name is its type, for clients that subscribe by event name."""
    return f"event: {fields['type']}\ndata: {json.dumps(fields)}\n\n".encode()


async def in_parts(
    audio: AsyncGenerator[bytes, None], encode: Callable[[bytes], bytes], last: Callable[[], bytes] = bytes
) -> AsyncGenerator[bytes, None]:
    """Yield `encode(part)` for each part of the audio, then `last()` unless it is empty."""
    async with aclosing(audio):
        async for part in audio:
            yield encode(part)
    if end := last():
        yield end
