"""OpenAI's pages of a list."""

from collections.abc import Mapping, Sequence

from deployments.errors import InvalidRequest
from serve_app.api.bodies.client_input import number


def page_of(items: Sequence[Mapping[str, object]], after: str, limit: str, *, most: int = 100) -> dict[str, object]:
    """The page of at most `limit` items behind the one whose id is `after`, else the first. Raises InvalidRequest."""
    wanted = number("limit", limit)
    if not isinstance(wanted, int) or not 1 <= wanted <= most:
        raise InvalidRequest(f"limit must be 1 to {most}.", "limit")
    start = next((index + 1 for index, item in enumerate(items) if item["id"] == after), 0)
    page = items[start : start + wanted]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": list(page), **ends, "has_more": start + wanted < len(items)}
