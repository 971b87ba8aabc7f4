"""Cartesia's pronunciation dictionaries, stored as lexicons with aliases. Requests select a dictionary by its ID."""

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.errors import InvalidRequest
from serve_app.api.parsing.client_input import read_object, text_of
from serve_app.api.responses.listing import STARTING_AFTER, Paging, json_in_thread
from serve_app.api.speech_service import SpeechService
from serve_app.extension import Charge, Dialect, Route
from serve_app.extensions.text.lexicon import Lexicon
from serve_app.extensions.voices.library import voices_of
from serve_app.extensions.voices.stored_voice import StoredLexicon

Json = dict[str, object]

_BASE = "/pronunciation-dicts"
_ONE = f"{_BASE}/{{dictionary_id}}"


async def add(service: SpeechService, request: Request) -> Response:
    """Store a dictionary of `items` with a `name`."""
    fields = await read_object(request)
    made = StoredLexicon.named(text_of(fields, "name"), _words(fields.get("items") or []))
    return JSONResponse(_entry(await voices_of(service).keep(made, {})))


async def change(service: SpeechService, request: Request, dictionary_id: str) -> Json:
    """Change the `name` or the `items` of a dictionary."""
    fields = await read_object(request)
    changes: Json = {} if fields.get("name") is None else {"name": text_of(fields, "name")}
    changes |= {} if fields.get("items") is None else {"words": _words(fields["items"])}
    lexicon = await voices_of(service).get_other(StoredLexicon, dictionary_id)
    return _entry(await voices_of(service).change(lexicon, lambda old: old.changed(**changes)))


async def show(service: SpeechService, dictionary_id: str) -> Json:
    """Return a dictionary with its items."""
    return _entry(await voices_of(service).get_other(StoredLexicon, dictionary_id))


async def list_all(service: SpeechService, limit: str = "", starting_after: str = "") -> Response:
    """Return a page of dictionaries, oldest first. A page contains ten entries unless the client sends a `limit`."""
    paging = Paging(limit, starting_after, STARTING_AFTER, default=10)
    page, more = paging.cut(await voices_of(service).all_of(StoredLexicon))
    return await json_in_thread(lambda: {"data": list(map(_entry, page)), "has_more": more is not None})


async def remove(service: SpeechService, dictionary_id: str) -> Response:
    """Delete a dictionary."""
    await voices_of(service).remove(await voices_of(service).get_other(StoredLexicon, dictionary_id))
    return Response(status_code=204)


def _words(items: object) -> dict[str, str]:
    """Return the respelling of each word. Raises InvalidRequest for invalid items, such as items with phonemes."""
    words: dict[str, str] = {}
    for item in items if isinstance(items, list) else [None]:
        fields = item if isinstance(item, dict) else {}
        word, said = fields.get("text"), fields.get("alias")
        if not isinstance(word, str) or not isinstance(said, str):
            raise InvalidRequest("items must be a list of objects with text and alias, as strings.", "items")
        words[word if fields.get("case_sensitive") else word.lower()] = said
    return Lexicon.checked(words, "items").words


def _entry(lexicon: StoredLexicon) -> Json:
    said = lexicon.words.items()
    items = [{"text": word, "alias": alias, "case_sensitive": word != word.lower()} for word, alias in said]
    made = datetime.fromtimestamp(lexicon.created_at, UTC).isoformat()
    about = {"id": lexicon.id, "name": lexicon.name, "owner_id": lexicon.owner, "created_at": made}
    return {**about, "items": items, "pinned": False}


DIALECT = Dialect(
    "Cartesia dictionaries",
    routes=(
        Route(f"POST {_BASE}", add),
        Route(f"POST {_BASE}/", add, "Store a pronunciation dictionary (Cartesia)"),
        Route(f"GET {_BASE}", list_all, charge=Charge.STREAM),
        Route(f"GET {_BASE}/", list_all, "List pronunciation dictionaries (Cartesia)", charge=Charge.STREAM),
        Route(f"GET {_ONE}", show, "Show a pronunciation dictionary (Cartesia)", charge=Charge.STREAM),
        Route(f"PATCH {_ONE}", change, "Change a pronunciation dictionary (Cartesia)"),
        Route(f"DELETE {_ONE}", remove, "Delete a pronunciation dictionary (Cartesia)"),
    ),
    heading="Cartesia",
)
