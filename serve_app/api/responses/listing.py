"""Paging and serialization of stored items, in threads, so that the event loop and live speech stay responsive."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

from pydantic_core import to_json
from starlette.responses import Response

from deployments.errors import InvalidRequest
from serve_app.api.parsing.client_input import number

P = ParamSpec("P")
T = TypeVar("T")
STARTING_AFTER = ("limit", "starting_after")  # query parameters of a page
_APART = ThreadPoolExecutor(2, "stored")  # asyncio's default threads are reserved for live speech


async def run_in_thread(work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Run `work` in a thread not used by live speech, for reading, encoding or serializing stored items."""
    call = partial(copy_context().run, work, *arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(_APART, call)


async def json_in_thread(work: Callable[P, Mapping[str, object]], *arguments: P.args, **options: P.kwargs) -> Response:
    """Run `work` in such a thread and return its result as a JSON response."""
    content = await run_in_thread(lambda: to_json(work(*arguments, **options)))
    return Response(content, media_type="application/json")


@dataclass(frozen=True, slots=True)
class Paging:
    """Page that a client requests. Missing parameters are ""."""

    limit: str
    after: str  # id of the item before this page
    names: tuple[str, str] = ("limit", "after")
    default: int = 100  # items per page
    most: int = 100

    def cut(self, items: Sequence[T], *, key: Callable[[Any], str] = attrgetter("id")) -> tuple[list[T], str | None]:
        """Return the page and, if more items follow, the id (`key`) of its last item. Raises InvalidRequest."""
        limit, after = self.names
        wanted = limit_of(self.limit or str(self.default), most=self.most, name=limit)
        places = {key(item): index for index, item in enumerate(items)}
        if self.after and self.after not in places:
            raise InvalidRequest(f"{after}: {self.after[:80]!r} is not in this list. Omit it to start again.", after)
        start = places[self.after] + 1 if self.after else 0
        page, has_more = items[start : start + wanted], start + wanted < len(items)
        return list(page), key(page[-1]) if has_more else None


def limit_of(limit: str, *, most: int, name: str = "limit") -> int:
    """Parse a query's `limit`. Raises InvalidRequest."""
    wanted = number(name, limit)
    if not isinstance(wanted, int) or not 1 <= wanted <= most:
        raise InvalidRequest(f"{name} must be 1 to {most}.", name)
    return wanted
