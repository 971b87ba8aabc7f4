"""What can be asked for: models and voices, in the shapes of every client that lists them."""

from dataclasses import asdict

from fastapi import APIRouter

from deployments.protocol import ModelInfo
from serve_app.api_settings import ApiSettings
from serve_app.speech_request import check_model
from serve_app.synthesizer import Synthesizer
from serve_app.voices import voice_list

Json = dict[str, object]


def catalogue_routes(synthesizer: Synthesizer, settings: ApiSettings) -> APIRouter:
    """`GET /v1/models`, `/v1/models/{id}`, `/v1/audio/models` and `/v1/audio/voices`."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> Json:
        """OpenAI's list: the loaded checkpoint, then the names that mean it too."""
        info = await synthesizer.describe()
        return {"object": "list", "data": [_model(name, info) for name in (info.name, *settings.model_aliases)]}

    @router.get("/v1/models/{model_id:path}")
    async def show_model(model_id: str) -> Json:
        """One model; checkpoint names have slashes."""
        info = await synthesizer.describe()
        check_model(model_id, info, settings)
        return _model(model_id, info)

    @router.get("/v1/audio/models")
    async def list_audio_models() -> Json:
        """Open WebUI's list."""
        info = await synthesizer.describe()
        return {"models": [{"id": name, "name": name} for name in (info.name, *settings.model_aliases)]}

    @router.get("/v1/audio/voices")
    async def list_voices() -> Json:
        """One answer for every client: some read `voices`, some `data`, some the languages."""
        info = await synthesizer.describe()
        known = [asdict(voice) for voice in voice_list(info.voices)]
        return {
            "object": "list",
            "voices": known,
            "data": known,
            "uploaded_voices": [],
            "languages": ["auto", *info.languages],
        }

    return router


def _model(name: str, info: ModelInfo) -> Json:
    """`root` says which checkpoint an alias means, as in vLLM."""
    described = {"kind": info.kind, "sample_rate": info.sample_rate, "languages": info.languages}
    return {"id": name, "object": "model", "created": 0, "owned_by": "talkray", "root": info.name, **described}
