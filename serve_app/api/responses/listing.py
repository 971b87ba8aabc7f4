"""Lists of what clients have stored: pages, and threads that keep the event loop and live speech free."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

from starlette.responses import Response

from deployments.errors import InvalidRequest
from serve_app.api.bodies.client_input import number

P = ParamSpec("P")
T = TypeVar("T")
_APART = ThreadPoolExecutor(2, "stored")  # asyncio's default threads are for live speech


async def apart(work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call it in a thread that live speech does not use: to read, encode or serialize what is stored."""
    call = partial(copy_context().run, work, *arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(_APART, call)


async def json_apart(work: Callable[P, object], *arguments: P.args, **options: P.kwargs) -> Response:
    """The result of `work` as JSON, both made in such a thread."""
    content = await apart(lambda: json.dumps(work(*arguments, **options)).encode())
    return Response(content, media_type="application/json")


def limit_of(limit: str, *, most: int) -> int:
    """The `limit` of a query. Raises InvalidRequest."""
    wanted = number("limit", limit)
    if not isinstance(wanted, int) or not 1 <= wanted <= most:
        raise InvalidRequest(f"limit must be 1 to {most}.", "limit")
    return wanted


def page_of(items: Sequence[Mapping[str, object]], after: str, limit: str, *, most: int = 100) -> dict[str, object]:
    """The page of at most `limit` items after the one whose id is `after`. Raises InvalidRequest."""
    wanted = limit_of(limit, most=most)
    start = next((index + 1 for index, item in enumerate(items) if item["id"] == after), 0)
    if after and not start:
        raise InvalidRequest(f"after: {after[:80]!r} is not in this list. Start again without it.", "after")
    page = items[start : start + wanted]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": list(page), **ends, "has_more": start + wanted < len(items)}
