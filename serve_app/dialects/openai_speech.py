"""OpenAI's `POST /v1/audio/speech`, also Azure's, and with the fields of servers that follow it."""

import re
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import InvalidRequest
from serve_app.api import ignored_fields
from serve_app.api.request import SpeechBody, check_length, parse_speech
from serve_app.api.speech_service import SpeechService, read_object, tagged
from serve_app.api.wish import CONTENT_TYPES, EVENT_STREAM, Wish, negotiate
from serve_app.audio.formats import AudioFormat
from serve_app.config import ApiSettings
from serve_app.dialects import mistral
from serve_app.dialects.table import Dialect, Route, Sample
from serve_app.speech.languages import language_name

# The page at `/docs` sends the example as it is; all fields at once would be refused.
_EXAMPLE = {"model": "qwen3-tts", "input": "Hello from Talkray.", "voice": "alloy", "response_format": "mp3"}
_ERROR = {"message": "what was wrong", "type": "invalid_request_error", "param": "input", "code": "invalid_value"}
SPEECH_DOCS = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": SpeechBody.model_json_schema(), "example": _EXAMPLE}},
    },
    "responses": {
        "200": {
            "description": "Audio in the format that was asked for, or events that carry it.",
            "content": {
                **{kind: {"schema": {"type": "string", "format": "binary"}} for kind in CONTENT_TYPES.values()},
                EVENT_STREAM: {"schema": {"type": "string"}},
            },
        },
        "default": {
            "description": "OpenAI's envelope; 429 and 503 say when to come again.",
            "content": {"application/json": {"example": {"error": _ERROR}}},
        },
    },
}
# tts-1-hd-zh: servers of Qwen3-TTS name the language with the model.
_WITH_LANGUAGE = re.compile(r"(tts-1(?:-hd)?)-([a-z]{2})")
_KOKORO_LANGUAGES = {"a": "en-US", "b": "en-GB", "e": "es", "f": "fr", "i": "it", "j": "ja", "p": "pt-BR", "z": "zh"}
# Dify's and Kokoro-FastAPI's words are understood as well.
_NAMES: ignored_fields.Names = {**ignored_fields.SPEECH, "instruction": "instructions", "lang_code": "language"}


async def speech(service: SpeechService, request: Request) -> Response:
    """Speaks `input`, streaming unless `stream` is false."""
    fields = await read_object(request, service)
    if "voice_id" in fields:
        return await mistral.speak(service, request, fields)
    return await service.respond(request, await strict_wish(service, fields, accept=_accept(request)))


async def speak_deployment(service: SpeechService, request: Request, deployment: str) -> Response:
    """The same for Azure's clients, whose deployments have names of their own."""
    fields = await read_object(request, service)
    reasons = {"model": "a deployment of any name is the loaded model"} if "model" in fields else {}
    wish = await strict_wish(service, fields, accept=_accept(request), made={"model": None}, reasons=reasons)
    return await service.respond(request, wish)


def spelled(fields: Mapping[str, object]) -> dict[str, object]:
    """`fields` with our names in place of the names of other servers of this API. Raises InvalidRequest."""
    ours = dict(fields)
    if "instruction" in ours and "instructions" not in ours:  # Dify
        ours["instructions"] = ours.pop("instruction")
    code = ours.get("lang_code")
    if not isinstance(code, str | None):
        raise InvalidRequest("lang_code must be a string.", "lang_code")
    if code is not None and "language" not in ours:  # Kokoro-FastAPI
        ours["language"] = _KOKORO_LANGUAGES.get(code, code)
        del ours["lang_code"]
    model = ours.get("model")
    named = _WITH_LANGUAGE.fullmatch(model) if isinstance(model, str) else None
    if named and language_name(named[2]) != named[2]:
        ours["model"] = named[1]
        ours.setdefault("language", named[2])
    return ours


async def strict_wish(
    service: SpeechService,
    fields: Mapping[str, object],
    *,
    accept: str = "",
    default: AudioFormat = AudioFormat.MP3,
    made: Mapping[str, object] | None = None,
    reasons: Mapping[str, str] | None = None,
) -> Wish:
    """The wish of a client that can know the models and voices here: unknown names are errors.

    Clients of other services get `SpeechService.lenient_wish`, which speaks with the default instead.

    `accept`: the Accept header. `default`: the format where neither the body nor `accept` names one. `made`: fields
    that the dialect sets itself. `reasons`: why fields have no effect, by field. Raises InvalidRequest, ModelNotFound.
    """
    made, found = made or {}, dict(reasons or {})
    body = _body({**spelled(fields), **made}, service.settings)
    info = await service.choose(body, fields)
    if body.voice is not None:
        service.check_voice(body.voice, info)
    stored = await service.stored(body, info)
    body, is_tagged = tagged(body, stored, found)
    delivery = negotiate(body, accept, default=default)
    if body.word_timestamps and not delivery.events and "word_timestamps" not in made:
        found["word_timestamps"] = "only events carry words: stream_format"
    names = {**_NAMES, **service.chosen_by}
    without_effect = ignored_fields.find_ignored(fields, body, info, names, reasons=found, stored=stored)
    return Wish(info, body, delivery, without_effect, stored, is_tagged)


def _body(given: Mapping[str, object], settings: ApiSettings) -> SpeechBody:
    """The fields that are known. Raises InvalidRequest."""
    body = parse_speech({name: given[name] for name in ignored_fields.SPEECH if given.get(name) is not None})
    check_length("input", body.input, settings)
    return body


def _accept(request: Request) -> str:
    return ", ".join(request.headers.getlist("accept"))


DIALECT = Dialect(
    "OpenAI",
    routes=(
        Route("POST /v1/audio/speech", speech, "Speak a text", docs=SPEECH_DOCS),
        Route("POST /openai/v1/audio/speech", speech),
        Route("POST /openai/deployments/{deployment}/audio/speech", speak_deployment, "Speak a text (Azure)"),
    ),
    heading="Speech",
    sample=Sample(
        "/v1/audio/speech",
        body={"model": "tts-1", "input": "$text", "voice": "$voice", "response_format": "pcm"},
        clients=(
            'openai (Python):  OpenAI(base_url="$url/v1", api_key=KEY)',
            'openai (JS):      new OpenAI({ baseURL: "$url/v1", apiKey: KEY })',
            'Vercel AI SDK:    createOpenAI({ baseURL: "$url/v1", apiKey: KEY }).speech("tts-1")',
            'LiveKit:          openai.TTS(base_url="$url/v1", api_key=KEY, voice="$voice")',
            'Pipecat:          OpenAITTSService(base_url="$url/v1", api_key=KEY)',
            'openai (Azure):   AzureOpenAI(azure_endpoint="$url", api_version="2025-04-01-preview", api_key=KEY)',
            'Mistral (JS):     new Mistral({ serverURL: "$url", apiKey: KEY }).audio.speech',
            (
                "Open WebUI:       AUDIO_TTS_ENGINE=openai AUDIO_TTS_OPENAI_API_BASE_URL=$url/v1 "
                "AUDIO_TTS_OPENAI_API_KEY=KEY AUDIO_TTS_MODEL=tts-1 AUDIO_TTS_VOICE=$voice"
            ),
            "SillyTavern:      TTS, OpenAI Compatible: Provider Endpoint $url/v1/audio/speech, voice $voice",
            (
                "LibreChat:        librechat.yaml, speech: { tts: { openai: { url: '$url/v1/audio/speech', "
                "apiKey: 'KEY', model: 'tts-1', voices: ['$voice'] } } }"
            ),
            "Home Assistant:   OpenAI TTS (HACS): URL $url/v1/audio/speech, model tts-1, voice $voice",
            "Home Assistant:   talkray wyoming $url, then Wyoming Protocol with its host and port 10200",
        ),
    ),
)
