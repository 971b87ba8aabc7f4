"""VoxServe's input streaming: a text is started, written, heard and ended by requests of their own."""

from collections.abc import Iterable
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve_app import ignored
from serve_app.dialects.voxserve import VOICE, form_fields, wished
from serve_app.speaker import Speaker, read_body, text_of


def routes(speaker: Speaker) -> APIRouter:
    """`POST /generate/stream/start`; `POST .../text`, `GET .../audio` and `POST .../end` of what was started."""
    router = APIRouter(prefix="/generate/stream")
    texts = speaker.posted_texts

    @router.post("/start", summary="Begin a text")
    async def start(request: Request) -> Response:
        """Begins a text in the voice that the fields ask for: `request_id` names it."""
        content, client = await read_body(request), request.state.caller.name
        speaker.check_room(client)
        fields = await form_fields(content, request.headers)
        wish = await wished(speaker, fields, VOICE)
        await speaker.utterance(request, wish, live=True)  # what is wrong with it is said here
        given = {name: fields[name] for name in VOICE if name in fields}
        request_id = await texts.open(given, client=client)
        return JSONResponse({"request_id": request_id}, headers=ignored.header(wish.ignored))

    @router.post("/{request_id}/text", summary="Write more of a text")
    async def write(request_id: str, request: Request) -> Response:
        """The text goes on with `text`, cut anywhere."""
        fields = await form_fields(await read_body(request), request.headers)
        await texts.append(request_id, text_of(fields), client=request.state.caller.name)
        return _answer("accepted", request_id, _ignored(name for name in fields if name != "text"))

    @router.get("/{request_id}/audio", summary="Hear a text while it is written", response_class=Response)
    async def hear(request_id: str, request: Request) -> Response:
        """Its audio while it is written, as WAV. One request may ask for it, before the text or behind its end."""
        client = request.state.caller.name
        speaker.check_room(client)
        await speaker.describe()  # the last thing that may be asked for again
        fields, parts = await texts.claim(request_id, client=client)
        wish = await wished(speaker, fields, VOICE)
        wish = replace(wish, ignored=wish.ignored | _ignored(request.query_params))
        return speaker.respond_live(request, wish, parts)

    @router.post("/{request_id}/end", summary="End a text")
    async def end(request_id: str, request: Request) -> Response:
        """There is no more text."""
        fields = await form_fields(await read_body(request), request.headers)
        await texts.finish(request_id, client=request.state.caller.name)
        return _answer("completed", request_id, _ignored(fields))

    return router


def _answer(status: str, request_id: str, reasons: ignored.Ignored) -> Response:
    return JSONResponse({"status": status, "request_id": request_id}, headers=ignored.header(reasons))


def _ignored(names: Iterable[str]) -> ignored.Ignored:
    return ignored.named(list(names), (), {})
