"""Lists of stored items, and the voice of one id."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

from serve_app.api import catalogue
from serve_app.api.responses.listing import Paging
from serve_app.api.voice_source import VoiceSource
from serve_app.speech.speech_models import SpeechModels

T = TypeVar("T")


async def prefetch_first(body: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Read the first part of `body`, so that an earlier error can still set the status, and return the same body."""
    first = await anext(body, b"")

    async def rest() -> AsyncGenerator[bytes, None]:
        async with aclosing(body):
            yield first
            async for part in body:
                yield part

    return rest()


def page_of(
    items: Sequence[T], entry: Callable[[T], Mapping[str, object]], after: str, limit: str, *, most: int = 100
) -> dict[str, object]:
    """Return a list object with at most `limit` items after the item with id `after`. Raises InvalidRequest."""
    page, more = Paging(limit, after, most=most).cut(items)
    data = [entry(item) for item in page]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": more is not None}


async def find_voice(voice_id: str, models: SpeechModels, voices: VoiceSource) -> catalogue.Voice:
    """Find a stored voice, speaker or alias. Speaker and alias names are case-insensitive. Raises InvalidRequest with
    the valid names.
    """
    if (stored := await voices.find(voice_id)) is not None:
        return catalogue.stored_voice(stored)
    infos = await models.infos()
    known = {voice.id: voice for voice in catalogue.voice_list(*infos)}
    speakers = [voice for info in infos for voice in info.voices]
    return known[voice_id if voice_id in known else catalogue.find_speaker(voice_id, speakers)]
