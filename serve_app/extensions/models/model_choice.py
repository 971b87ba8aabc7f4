"""Choose the model that serves a request. docs/models.md lists the criteria in the same order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deployments.errors import InvalidRequest, NotFound
from deployments.protocol import ModelInfo, ModelKind
from serve_app.api import catalogue
from serve_app.api.parsing.field_names import Names
from serve_app.api.resolve.resolver import RequestHooks, Resolver
from serve_app.api.voice_source import VoiceSource
from serve_app.config import CLONE_ALIAS, ApiSettings
from serve_app.speech.speech_models import SpeechModels

_TASKS = {"customvoice": ModelKind.CUSTOM_VOICE, "voicedesign": ModelKind.VOICE_DESIGN, "base": ModelKind.BASE}
_CHECKPOINTS = {  # names in error messages
    ModelKind.CUSTOM_VOICE: "a CustomVoice checkpoint",
    ModelKind.VOICE_DESIGN: "a VoiceDesign checkpoint",
    ModelKind.BASE: "a Base checkpoint",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHints:
    """Fields of a request that determine its model. Missing fields are None or False."""

    model: str | None = None
    has_recording: bool = False  # the recording is in the request, or `voice` is a stored voice
    task_type: object = None
    voice: str | None = None
    lost_voice: NotFound | None = None  # the error if `voice` looks like a voice ID but does not exist
    instructions: object = None


class ModelHooks(RequestHooks):
    """Chooses the model for every request."""

    def further_fields(self, models: SpeechModels) -> Names:
        return {"task_type": None} if len(models) > 1 else {}

    async def choose_model(
        self, resolver: Resolver, hints: Mapping[str, object], *, sent: Mapping[str, object], lenient: bool
    ) -> ModelInfo:
        """If there is only one model, it serves all requests. Unless `lenient`, check the model name in the request.
        Raises NotReady, and the errors of `choose_model`.
        """
        models = await resolver.models.infos()
        model, voice = (name if isinstance(name := hints.get(field), str) else None for field in ("model", "voice"))
        has_recording = hints.get("ref_audio") is not None or await _is_stored(resolver.voices, voice, models)
        wanted = ModelHints(
            model=model,
            has_recording=has_recording,
            task_type=sent.get("task_type"),
            voice=voice,
            lost_voice=None if len(models) == 1 or has_recording else resolver.voices.missing(voice),
            instructions=hints.get("instructions"),
        )
        info = choose_model(wanted, models, resolver.settings, lenient=lenient)
        if not lenient:
            catalogue.check_model(model, info, resolver.settings)
        return info


async def _is_stored(voices: VoiceSource, voice: str | None, models: Sequence[ModelInfo]) -> bool:
    """Return whether `voice` is a stored voice. With a single model, return False, because it does not matter.

    If a model has a speaker of this name, search only the voices in memory. Most requests name a speaker, and each
    would otherwise wait for the store.
    """
    if len(models) == 1 or voice is None:
        return False
    is_speaker = any(catalogue.is_named(voice, info.voices) for info in models)
    return (voices.known(voice) if is_speaker else await voices.find(voice)) is not None


def choose_model(wanted: ModelHints, models: Sequence[ModelInfo], settings: ApiSettings, *, lenient: bool) -> ModelInfo:
    """Choose the model for a request. The first of `models` is the default.

    If `lenient`, ignore unknown models and voices, because clients of other APIs use names that do not exist here.
    Raises InvalidRequest and ModelNotFound, which name the model to deploy or the field to send.
    """
    if len(models) == 1:
        return models[0]
    named = _by_model(wanted.model, models, settings, lenient=lenient)
    if named is not None:
        return named
    if wanted.has_recording:
        return _of_kind(ModelKind.BASE, models, "a recording", "ref_audio")
    chosen = _by_task(wanted.task_type, models)
    if chosen is None and wanted.lost_voice is not None and not lenient:
        raise wanted.lost_voice
    chosen = chosen or _by_voice(wanted.voice, models, lenient=lenient)
    if chosen is None and wanted.instructions:
        return _of_kind(ModelKind.VOICE_DESIGN, models, "instructions without a voice", "instructions")
    by_default = None if wanted.voice else _by_voice(settings.default_voice, models, lenient=True)
    return chosen or by_default or models[0]


def _by_model(
    name: str | None, models: Sequence[ModelInfo], settings: ApiSettings, *, lenient: bool
) -> ModelInfo | None:
    """Return the model with this name, or None if there is no name, or only an alias such as "tts-1".

    If it is None, other fields determine the model.
    """
    is_own = any(catalogue.matches_model(name, info) for info in models) if name else False
    if name is None or (catalogue.is_alias(name, settings) and not is_own):
        return None
    if catalogue.unpinned(name) == CLONE_ALIAS and not is_own:
        return _of_kind(ModelKind.BASE, models, f"model {CLONE_ALIAS!r}", "model")
    named = next((info for info in models if info.name == name), None) or _only(
        [info for info in models if catalogue.matches_model(name, info)], f"model {name[:80]!r}", models[0]
    )
    if named is None and not lenient:
        raise catalogue.not_loaded(name, models, settings)
    return named


def _by_task(task: object, models: Sequence[ModelInfo]) -> ModelInfo | None:
    if task is None:
        return None
    kind = _TASKS.get(task.lower()) if isinstance(task, str) else None
    if kind is None:
        raise InvalidRequest(f"task_type: {str(task)[:40]!r} is not CustomVoice, VoiceDesign or Base.", "task_type")
    return _of_kind(kind, models, "task_type", "task_type")


def _by_voice(name: str | None, models: Sequence[ModelInfo], *, lenient: bool) -> ModelInfo | None:
    """Return the model that has the voice `name`, or None.

    Speakers of a model take precedence over OpenAI's voice names, which every model with speakers accepts.
    """
    speaking = [info for info in models if info.voices]
    wanted = (name or "").lower()
    if not wanted or not speaking:
        return None
    own = [info for info in speaking if wanted in info.voices]
    chosen = _only(own or [info for info in speaking if wanted in catalogue.aliases(info.voices)], "voice", models[0])
    if chosen is None and not lenient:
        catalogue.find_speaker(wanted, list(dict.fromkeys(voice for info in speaking for voice in info.voices)))
    return chosen


def _of_kind(kind: ModelKind, models: Sequence[ModelInfo], need: str, param: str) -> ModelInfo:
    """Return the only or default model of the kind that `need` requires. Raises InvalidRequest otherwise."""
    chosen = _only([info for info in models if info.kind is kind], need, models[0])
    if chosen is None:
        raise not_deployed(kind, models, need, param)
    return chosen


def not_deployed(kind: ModelKind, models: Sequence[ModelInfo], need: str, param: str | None = None) -> InvalidRequest:
    """Return an error that names the model to deploy for `need`."""
    here = ", ".join(f"{info.name} ({info.kind})" for info in models)
    message = f"{need} requires {_CHECKPOINTS[kind]}, but this server runs only {here}."
    return InvalidRequest(message, param, "model_not_deployed")


def _only(candidates: Sequence[ModelInfo], need: str, default: ModelInfo) -> ModelInfo | None:
    """Return the default model if it is a candidate, or the only candidate. Raises InvalidRequest for several."""
    if default in candidates:
        return default
    if len(candidates) > 1:
        names = ", ".join(info.name for info in candidates)
        raise InvalidRequest(f"{need} matches several models ({names}). Set model to one.", "model", "ambiguous_model")
    return candidates[0] if candidates else None
