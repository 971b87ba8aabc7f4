"""OpenAI's `POST /v1/audio/speech`, also Azure's, and with the fields of servers that follow it."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve_app.api.reading.http_request import read_object, read_speech
from serve_app.api.speech_service import SpeechService
from serve_app.api.wishes import ignored_fields
from serve_app.api.wishes.make_wish import strict_wish
from serve_app.dialects import mistral
from serve_app.dialects.openai_clients import SAMPLE, SPEECH_DOCS, TEXT_DOCS
from serve_app.dialects.table import Dialect, Route
from serve_app.speech.spoken_text import LEFT_OUT


async def speech(service: SpeechService, request: Request) -> Response:
    """Speaks `input`, streaming unless `stream` is false."""
    fields = await read_speech(request, service)
    if "voice_id" in fields:  # Mistral's clients speak at the same path, with their own names of fields
        return await mistral.speak(service, request, fields)
    return await service.respond(request, await strict_wish(service.offer, fields, accept=_accept(request)))


async def speak_deployment(service: SpeechService, request: Request, deployment: str) -> Response:
    """The same for Azure's clients, whose deployments have names of their own."""
    fields = await read_speech(request, service)
    reasons = {"model": "a deployment of any name is the loaded model"} if "model" in fields else {}
    wish = await strict_wish(service.offer, fields, accept=_accept(request), overrides={"model": None}, reasons=reasons)
    return await service.respond(request, wish)


def _accept(request: Request) -> str:
    return ", ".join(request.headers.getlist("accept"))


async def show_text(service: SpeechService, request: Request) -> Response:
    """Takes the fields of `/v1/audio/speech`, and answers what would be spoken, what would not, and in which parts."""
    fields = await read_object(request)
    wish = await strict_wish(service.offer, fields)
    spoken = wish.spoken
    answer = {
        "object": "audio.text",
        "model": wish.info.name,
        "markup": spoken.rules.markup,
        "sent": spoken.sent,
        "spoken": spoken.text,
        "left_out": [{"what": what, "count": count} for what, count in spoken.left_out.items()],
        "segments": [
            {"text": each.text, "pause_s": each.pause_s, "speed": each.speed} for each in service.segments(wish)
        ],
        "changed": [
            {"written": piece.written.replace(LEFT_OUT, "").strip(), "spoken": piece.spoken.strip()}
            for piece in spoken.pieces()
            if piece.spoken.strip() and piece.spoken.split() != piece.written.replace(LEFT_OUT, "").split()
        ],
        "ignored": ignored_fields.entries(wish.ignored),
    }
    return JSONResponse(answer, headers=ignored_fields.as_header(wish.ignored))


DIALECT = Dialect(
    "OpenAI",
    routes=(
        Route("POST /v1/audio/speech", speech, "Speak a text", docs=SPEECH_DOCS),
        Route("POST /v1/audio/text", show_text, "Show what of a text is spoken", docs=TEXT_DOCS),
        Route("POST /openai/v1/audio/speech", speech),
        Route("POST /openai/deployments/{deployment}/audio/speech", speak_deployment, "Speak a text (Azure)"),
    ),
    heading="Speech",
    sample=SAMPLE,
)
