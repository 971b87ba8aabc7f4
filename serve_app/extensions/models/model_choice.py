"""Choose which of several models answers a request. docs/models.md lists the criteria, in this order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deployments.errors import InvalidRequest, NotFound
from deployments.protocol import ModelInfo, ModelKind
from serve_app.api import catalogue
from serve_app.api.resolve.resolver import Resolver
from serve_app.config import CLONE_ALIAS, ApiSettings
from serve_app.extension import Opened

_TASKS = {"customvoice": ModelKind.CUSTOM_VOICE, "voicedesign": ModelKind.VOICE_DESIGN, "base": ModelKind.BASE}
_CHECKPOINTS = {  # the model to deploy
    ModelKind.CUSTOM_VOICE: "a CustomVoice checkpoint",
    ModelKind.VOICE_DESIGN: "a VoiceDesign checkpoint",
    ModelKind.BASE: "a Base checkpoint",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHints:
    """The fields of a request that decide. Absent ones are None or False."""

    model: str | None = None
    has_recording: bool = False  # in the request, or stored
    task_type: object = None
    voice: str | None = None
    lost_voice: NotFound | None = None  # if `voice` can only be the id of a stored voice, and none has it
    instructions: object = None


class ModelChoice(Opened):
    """Chooses the model of every request."""

    def join(self, resolver: Resolver) -> None:
        resolver.choose_model = model_for
        if len(resolver.models) > 1:
            resolver.further_fields = {**resolver.further_fields, "task_type": None}


async def model_for(
    resolver: Resolver, fields: Mapping[str, object], *, task_type: object, lenient: bool = False
) -> ModelInfo:
    """The model for a request whose `fields` have the names of a SpeechBody, not yet checked if `lenient`.

    A single model answers all requests. Its name is checked unless `lenient`. Raises NotReady, and as `choose_model`.
    """
    models = await resolver.models.infos()
    model, voice = (value if isinstance(value, str) else None for value in (fields.get("model"), fields.get("voice")))
    has_recording = fields.get("ref_audio") is not None or await _is_stored(resolver, voice, models)
    wanted = ModelHints(
        model=model,
        has_recording=has_recording,
        task_type=task_type,
        voice=voice,
        lost_voice=None if len(models) == 1 or has_recording else resolver.voices.missing(voice),
        instructions=fields.get("instructions"),
    )
    info = choose_model(wanted, models, resolver.settings, lenient=lenient)
    if not lenient:
        catalogue.check_model(model, info, resolver.settings)
    return info


async def _is_stored(resolver: Resolver, voice: str | None, models: Sequence[ModelInfo]) -> bool:
    """Whether `voice` is a stored voice; False with a single model, because then nothing depends on it.

    If a model has a speaker of that name, only voices that this replica already knows count. Most requests name such a
    speaker, and asking the store would cost each of them a round trip.
    """
    if len(models) == 1 or voice is None:
        return False
    is_speaker = any(catalogue.is_named(voice, info.voices) for info in models)
    return (resolver.voices.known(voice) if is_speaker else await resolver.voices.find(voice)) is not None


def choose_model(wanted: ModelHints, models: Sequence[ModelInfo], settings: ApiSettings, *, lenient: bool) -> ModelInfo:
    """The model for a request, from `models`, whose first is the default.

    Clients of a `lenient` dialect cannot know our names: unknown models and voices are not considered. Raises
    InvalidRequest and ModelNotFound, which name the model to deploy or the field to send.
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
    """None if `name` is missing or an alias such as "tts-1": other fields then decide."""
    is_own = any(catalogue.means(name, info) for info in models) if name else False
    if name is None or (catalogue.is_alias(name, settings) and not is_own):
        return None
    if catalogue.unpinned(name) == CLONE_ALIAS and not is_own:
        return _of_kind(ModelKind.BASE, models, f"model {CLONE_ALIAS!r}", "model")
    named = next((info for info in models if info.name == name), None) or _only(
        [info for info in models if catalogue.means(name, info)], f"model {name[:80]!r}", models[0]
    )
    if named is None and not lenient:
        raise catalogue.not_loaded(name, models, settings)
    return named


def _by_task(task: object, models: Sequence[ModelInfo]) -> ModelInfo | None:
    if task is None:
        return None
    kind = _TASKS.get(task.lower()) if isinstance(task, str) else None
    if kind is None:
        raise InvalidRequest(f"task_type: {str(task)[:40]!r} is none of CustomVoice, VoiceDesign, Base.", "task_type")
    return _of_kind(kind, models, "task_type", "task_type")


def _by_voice(name: str | None, models: Sequence[ModelInfo], *, lenient: bool) -> ModelInfo | None:
    """A model's own speakers take precedence over OpenAI's names, which every model with speakers accepts."""
    speaking = [info for info in models if info.voices]
    wanted = (name or "").lower()
    if not wanted or not speaking:
        return None
    own = [info for info in speaking if wanted in info.voices]
    chosen = _only(own or [info for info in speaking if wanted in catalogue.aliases(info.voices)], "voice", models[0])
    if chosen is None and not lenient:
        catalogue.resolve(wanted, list(dict.fromkeys(voice for info in speaking for voice in info.voices)))
    return chosen


def _of_kind(kind: ModelKind, models: Sequence[ModelInfo], need: str, param: str) -> ModelInfo:
    """The model of the kind that `need`, in field `param`, requires. Raises InvalidRequest for none or several."""
    chosen = _only([info for info in models if info.kind is kind], need, models[0])
    if chosen is None:
        raise not_deployed(kind, models, need, param)
    return chosen


def not_deployed(kind: ModelKind, models: Sequence[ModelInfo], need: str, param: str | None = None) -> InvalidRequest:
    """The error that names the model to deploy for `need`."""
    here = ", ".join(f"{info.name} ({info.kind})" for info in models)
    message = f"{need} needs {_CHECKPOINTS[kind]}, and none is deployed here: {here}."
    return InvalidRequest(message, param, "model_not_deployed")


def _only(candidates: Sequence[ModelInfo], need: str, default: ModelInfo) -> ModelInfo | None:
    """The default model if it is a candidate, else the only candidate."""
    if default in candidates:
        return default
    if len(candidates) > 1:
        names = ", ".join(info.name for info in candidates)
        raise InvalidRequest(f"{need} fits several models ({names}): name one in model.", "model", "ambiguous_model")
    return candidates[0] if candidates else None
