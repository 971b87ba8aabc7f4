"""OpenAI's `POST /v1/audio/speech`, with Azure's variant and the extra fields of compatible servers, and lists of
models and voices in OpenAI's format, extended with fields that other clients expect on the same paths.
"""

from collections.abc import Mapping
from dataclasses import fields

from starlette.requests import Request
from starlette.responses import Response

from deployments.protocol import ModelInfo, ModelKind
from serve_app.api.catalogue import Voice, all_voices, matches_model, not_loaded, page_of_voices, unpinned
from serve_app.api.parsing.client_input import switch
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.resolve.make_request import strict_request
from serve_app.api.resolve.speech_request import CONTENT_TYPES, EVENT_STREAM
from serve_app.api.responses.listing import Paging, json_in_thread
from serve_app.api.responses.respond import respond
from serve_app.api.speech_service import SpeechService
from serve_app.config import CLONE_ALIAS
from serve_app.extension import Charge, Dialect, JsonRoute, Route, Sample
from serve_app.speech.model_state import ModelState

Json = dict[str, object]

_VOICE_FIELDS = [field.name for field in fields(Voice)]


async def create_speech(service: SpeechService, request: Request, fields: Mapping[str, object]) -> Response:
    """Speak `input`. The response is streamed unless `stream` is false."""
    return await respond(service, request, await strict_request(service.resolver, fields, accept=_accept(request)))


async def speak_deployment(service: SpeechService, request: Request, deployment: str) -> Response:
    """Speak `input` for Azure's clients, whose deployments may have any name."""
    fields = await service.read_fields(request)
    reasons = {"model": "every deployment name selects the loaded model"} if "model" in fields else {}
    speech = await strict_request(
        service.resolver, fields, accept=_accept(request), overrides={"model": None}, reasons=reasons
    )
    return await respond(service, request, speech)


def _accept(request: Request) -> str:
    return ", ".join(request.headers.getlist("accept"))


# The page at `/docs` sends this example unchanged. A body with all fields would be rejected.
_EXAMPLE = {"model": "qwen3-tts", "input": "Hello from Talkray.", "voice": "alloy", "response_format": "mp3"}
_ERROR = {"message": "the problem", "type": "invalid_request_error", "param": "input", "code": "invalid_value"}
SPEECH_DOCS = {
    "operationId": "speech_v1_audio_speech_post",  # sets method names in generated clients
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": SpeechBody.model_json_schema(), "example": _EXAMPLE}},
    },
    "responses": {
        "200": {
            "description": "Audio in the requested format, or events with encoded audio.",
            "content": {
                **{kind: {"schema": {"type": "string", "format": "binary"}} for kind in CONTENT_TYPES.values()},
                EVENT_STREAM: {"schema": {"type": "string"}},
            },
        },
        "default": {
            "description": "OpenAI's error object. Retry a 429 or 503 after the time in Retry-After.",
            "content": {"application/json": {"example": {"error": _ERROR}}},
        },
    },
}
_SAMPLE = Sample(
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
)
SPEECH_DIALECT = Dialect(
    "OpenAI",
    routes=(
        JsonRoute("POST /v1/audio/speech", create_speech, "Speak a text", docs=SPEECH_DOCS),
        JsonRoute("POST /openai/v1/audio/speech", create_speech),
        Route("POST /openai/deployments/{deployment}/audio/speech", speak_deployment, "Speak a text (Azure)"),
    ),
    heading="Speech",
    sample=_SAMPLE,
)


async def list_models(service: SpeechService, request: Request) -> Json | list[Json]:
    """List the models, then the aliases of the default model, in OpenAI's format. ElevenLabs clients get their own
    format.
    """
    if "xi-api-key" in request.headers:
        known = await service.models.infos()
        return [{"model_id": info.name, "name": info.name, "can_do_text_to_speech": True} for info in known]
    return {"object": "list", "data": list((await _entries(service)).values())}


async def show_model(service: SpeechService, model_id: str) -> Json:
    """Show one model. Model ids may contain slashes."""
    known = await service.models.infos()
    names = await _entries(service)
    if model_id in names:
        return names[model_id]
    meant = next((info for info in known if matches_model(model_id, info)), None)
    if meant is None and (undated := unpinned(model_id)) in service.settings.model_aliases:
        return {**names[undated], "id": model_id}
    if meant is None and undated == CLONE_ALIAS:
        meant = next((info for info in known if info.kind is ModelKind.BASE), None)
    if meant is None:
        raise not_loaded(model_id, known, service.settings)
    return {**names[meant.name], "id": model_id}


async def list_audio_models(service: SpeechService) -> Json:
    """List the models in Open WebUI's format."""
    return {"models": [{"id": name, "name": name} for name in await _entries(service)]}


async def list_voices(service: SpeechService, limit: str = "", after: str = "", legacy: str = "") -> Response:
    """List the voices in one response for all clients, which read `voices`, `data` or `languages`. With `legacy`, list
    only names.
    """
    bare = switch({"legacy": legacy}, "legacy")
    loaded = await service.models.infos()
    voices = await all_voices(loaded, service.resolver.voices)
    page, more = page_of_voices(voices, Paging(limit, after), service.resolver.voices)

    def listed() -> Json:
        known = list(map(_entry_of, page))
        if bare:
            return {"voices": [voice["name"] for voice in known], "has_more": more is not None}
        return {
            "object": "list",
            "voices": known,
            "data": known,
            "uploaded_voices": [voice for voice in known if voice["type"] == "stored"],
            "languages": ["auto", *dict.fromkeys(language for info in loaded for language in info.languages)],
            "has_more": more is not None,
        }

    return await json_in_thread(listed)


def _entry_of(voice: Voice) -> Json:
    """Convert a voice to a list entry. Clients send back either the id or the name, so for a model's own voices both
    contain the id.
    """
    fields_of_voice: Json = {name: getattr(voice, name) for name in _VOICE_FIELDS}
    return fields_of_voice if voice.type == "stored" else {**fields_of_voice, "name": voice.id}


async def _entries(service: SpeechService) -> dict[str, Json]:
    """Return one entry per model name: the models' own names first, then the aliases of the default model."""
    known = await service.models.infos()
    states = service.models.states()
    own = {info.name: _model(info.name, info, states[info.route]) for info in known}
    # Add models whose files are on other nodes and that their talkers have not described yet.
    own |= {name: _entry(name, name, state) for name, state in states.items() if name and name not in own}
    aliases = service.settings.model_aliases
    return own | {alias: _model(alias, known[0], states[known[0].route]) for alias in aliases}


def _model(name: str, info: ModelInfo, state: ModelState) -> Json:
    """Describe a model under `name`. As in vLLM, `root` of an alias is the checkpoint."""
    described = {"kind": info.kind, "sample_rate": info.sample_rate, "languages": info.languages}
    return {**_entry(name, info.checkpoint or info.name, state), **described}


def _entry(name: str, root: str, state: ModelState) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "talkray", "root": root, **state.as_json()}


LIST_DIALECT = Dialect(
    "OpenAI",
    routes=(
        Route("GET /v1/models", list_models, "List models", charge=Charge.NOTHING),
        Route("GET /v1/models/{model_id:path}", show_model, "Show a model"),
        Route("GET /v1/audio/models", list_audio_models, "List models (Open WebUI)"),
        Route("GET /v1/audio/voices", list_voices, "List voices", charge=Charge.NOTHING),
    ),
    heading="Models and voices",
)
