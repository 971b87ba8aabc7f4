"""Context in which requests are validated and built. Extensions replace the core's functions when they are opened."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, ClassVar, Protocol

from deployments.errors import TalkrayError
from deployments.protocol import ModelInfo
from serve_app.api import catalogue
from serve_app.api.error_replies import ErrorKind, ExtensionError
from serve_app.api.parsing.field_names import Names
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.resolve.ignored_fields import Reasons, of_text
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.api.voice_source import ClonedVoice, NoVoices, VoiceSource
from serve_app.audio.recordings import Decode
from serve_app.config import ApiSettings
from serve_app.speech.observers import WordSource
from serve_app.speech.segments import Utterance
from serve_app.speech.speech_models import SpeechModels
from serve_app.text.characters import clean
from serve_app.text.spoken import SPOKEN_FORMS, UNSPOKEN, SpokenText, TextSpan


class ModelResolver(Protocol):
    """Selects the model for a request."""

    async def __call__(
        self, resolver: "Resolver", fields: Mapping[str, object], *, task_type: object, lenient: bool = False
    ) -> ModelInfo:
        """Return the model for `fields`, which use SpeechBody's names. If `lenient`, the fields are not validated yet,
        and an unknown model name is ignored. Raises InvalidRequest, ModelNotFound, NotReady.
        """
        ...


class WordTimer(Protocol):
    """Determines the timestamp of each word in a text."""

    def __call__(self, source: SpokenText, info: ModelInfo, *, speed: float = 1.0) -> WordSource: ...


@dataclass(frozen=True, slots=True)
class Draft:
    """Resolved request. Extensions' steps may change both fields."""

    speech: SpeechRequest
    utterance: Utterance


Step = Callable[[Draft], Awaitable[Draft]]
# The spoken part of `body.input`, and why the rest of it and some related fields have no effect. Raises InvalidRequest.
TextResolver = Callable[["Resolver", SpeechBody, ModelInfo, ClonedVoice | None], Awaitable[tuple[SpokenText, Reasons]]]


class StepFailed(ExtensionError):
    """A step of an extension failed. The message names the extension."""

    kind: ClassVar = ErrorKind(500, "server_error", "extension_failed")


async def model_by_name(
    resolver: "Resolver", fields: Mapping[str, object], *, task_type: object, lenient: bool = False
) -> ModelInfo:
    """Return the model that the request names, or the default model."""
    models = await resolver.models.infos()
    name = fields.get("model")
    if not isinstance(name, str):
        return models[0]
    named = next((info for info in models if catalogue.matches_model(name, info)), models[0])
    if not lenient and not catalogue.is_known(name, named, resolver.settings):
        raise catalogue.not_loaded(name, models, resolver.settings)
    return named


async def read_plainly(
    resolver: "Resolver", body: SpeechBody, info: ModelInfo, stored: ClonedVoice | None
) -> tuple[SpokenText, Reasons]:
    """Return the text, unchanged or with numbers and symbols replaced by the words that the model reads."""
    form = info.spoken_form
    speak, count_lost = map(resolve_name, SPOKEN_FORMS[form]) if form else (clean, lambda text: 0)
    text, lost = speak(body.input), count_lost(body.input)
    left_out = Counter({UNSPOKEN: lost} if lost else {})
    spoken = SpokenText(body.input, (TextSpan(text),) if text else (), left_out)
    return spoken, of_text(spoken)


@dataclass(slots=True)
class Resolver:
    """Context for resolving requests: models, settings, voices, and the functions involved.

    The functions receive the resolver as an argument, because jobs use a copy with other settings.
    """

    models: SpeechModels
    settings: ApiSettings
    voices: VoiceSource = field(default_factory=NoVoices)
    choose_model: ModelResolver = model_by_name
    read_text: TextResolver = read_plainly
    time_words: WordTimer | None = None  # None: word timestamps are unavailable
    prepare_recording: Decode | None = None  # None: recordings are used as they are
    lexicon_for_all: Callable[[], Awaitable[Any]] | None = None  # returns a Lexicon of the extension `text`
    # Additional SpeechBody fields that extensions read, and names of additional request fields.
    fields: set[str] = field(default_factory=set)
    further_fields: Names = field(default_factory=dict)
    steps: dict[str, Step] = field(default_factory=dict)  # the final steps for each utterance, by extension
    on_discard: list[Callable[[Utterance], None]] = field(default_factory=list)  # called if the speech is not sent

    async def run_steps(self, draft: Draft) -> Draft:
        """Run the steps of all extensions. Raises StepFailed, and TalkrayError from a step."""
        for name, step in self.steps.items():
            try:
                draft = await step(draft)
            except TalkrayError:
                raise
            except Exception as error:
                raise StepFailed(f"The extension {name} failed during this request.") from error
        return draft
