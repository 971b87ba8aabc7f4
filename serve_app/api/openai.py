"""OpenAI's `POST /v1/audio/speech`, with Azure's variant and the extra fields of compatible servers, and lists of
models and voices in OpenAI's format, extended with fields that other clients expect on the same paths.
"""

from collections.abc import Mapping
from dataclasses import fields

from starlette.requests import Request
from starlette.responses import Response

from deployments.protocol import ModelInfo, ModelKind
from serve_app.api.catalogue import Voice, all_voices, matches_model, not_loaded, page_of_voices, unpinned
from serve_app.api.openai_docs import SAMPLE, speech_docs
from serve_app.api.parsing.client_input import switch
from serve_app.api.responses.listing import Paging, json_in_thread
from serve_app.api.responses.respond import respond
from serve_app.api.speech_service import SpeechService
from serve_app.config import CLONE_ALIAS
from serve_app.extension import Charge, Dialect, JsonRoute, Route
from serve_app.speech.model_state import ModelState

Json = dict[str, object]

_VOICE_FIELDS = [field.name for field in fields(Voice)]


async def create_speech(service: SpeechService, request: Request, fields: Mapping[str, object]) -> Response:
    """Speak `input`. The response is streamed unless `stream` is false."""
    return await respond(service, request, await service.resolver.strict_request(fields, accept=_accept(request)))


async def speak_deployment(service: SpeechService, request: Request, deployment: str) -> Response:
    """Speak `input` for Azure's clients, whose deployments may have any name."""
    fields = await service.read_fields(request)
    reasons = {"model": "every deployment name selects the loaded model"} if "model" in fields else {}
    speech = await service.resolver.strict_request(
        fields, accept=_accept(request), overrides={"model": None}, reasons=reasons
    )
    return await respond(service, request, speech)


def _accept(request: Request) -> str:
    return ", ".join(request.headers.getlist("accept"))


SPEECH_DIALECT = Dialect(
    "OpenAI",
    routes=(
        JsonRoute("POST /v1/audio/speech", create_speech, "Speak a text", docs=speech_docs),
        JsonRoute("POST /openai/v1/audio/speech", create_speech),
        Route("POST /openai/deployments/{deployment}/audio/speech", speak_deployment, "Speak a text (Azure)"),
    ),
    heading="Speech",
    key_parameters=("api_key", "token"),
    sample=SAMPLE,
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
