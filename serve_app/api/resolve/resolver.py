"""The context in which requests are checked and built. Extensions replace the core's answers when they open."""

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
from serve_app.api.voice_source import KeptVoice, NoVoices, VoiceSource
from serve_app.audio.recordings import Decode
from serve_app.config import ApiSettings
from serve_app.speech.segments import Utterance
from serve_app.speech.speech_models import SpeechModels
from serve_app.speech.words import WordSource
from serve_app.text.characters import clean
from serve_app.text.spoken import SPOKEN_FORMS, UNSPOKEN, SpokenText, TextSpan


class ModelResolver(Protocol):
    """Says which model answers a request."""

    async def __call__(
        self, resolver: "Resolver", fields: Mapping[str, object], *, task_type: object, lenient: bool = False
    ) -> ModelInfo:
        """`fields` have the names of a SpeechBody, not yet checked if `lenient`. Then a name that is unknown decides
        nothing. Raises InvalidRequest, ModelNotFound, NotReady.
        """
        ...


class WordTimer(Protocol):
    """Says when the words of a text are heard."""

    def __call__(self, source: SpokenText, info: ModelInfo, *, speed: float = 1.0) -> WordSource: ...


@dataclass(frozen=True, slots=True)
class Draft:
    """A request that is resolved: steps of extensions may change both."""

    speech: SpeechRequest
    utterance: Utterance


Step = Callable[[Draft], Awaitable[Draft]]
# The spoken text of `body.input`; and the reasons why the rest of it, and some fields about it, have no effect. Raises
# InvalidRequest.
TextResolver = Callable[["Resolver", SpeechBody, ModelInfo, KeptVoice | None], Awaitable[tuple[SpokenText, Reasons]]]


class StepFailed(ExtensionError):
    """A step of an extension failed. The message names the extension."""

    kind: ClassVar = ErrorKind(500, "server_error", "extension_failed")


async def model_by_name(
    resolver: "Resolver", fields: Mapping[str, object], *, task_type: object, lenient: bool = False
) -> ModelInfo:
    """The model whose name the request has, else the default one."""
    models = await resolver.models.infos()
    name = fields.get("model")
    if not isinstance(name, str):
        return models[0]
    named = next((info for info in models if catalogue.means(name, info)), models[0])
    if not lenient and not catalogue.is_known(name, named, resolver.settings):
        raise catalogue.not_loaded(name, models, resolver.settings)
    return named


async def read_plainly(
    resolver: "Resolver", body: SpeechBody, info: ModelInfo, stored: KeptVoice | None
) -> tuple[SpokenText, Reasons]:
    """The text as it is, or in the words that the voice reads."""
    form = info.spoken_form
    speak, count_lost = map(resolve_name, SPOKEN_FORMS[form]) if form else (clean, lambda text: 0)
    text, lost = speak(body.input), count_lost(body.input)
    left_out = Counter({UNSPOKEN: lost} if lost else {})
    spoken = SpokenText(body.input, (TextSpan(text),) if text else (), left_out)
    return spoken, of_text(spoken)


@dataclass(slots=True)
class Resolver:
    """The context of a request: models, settings, voices. And who answers the questions about it.

    The answering functions take the resolver, because jobs use a copy of it with settings of their own.
    """

    models: SpeechModels
    settings: ApiSettings
    voices: VoiceSource = field(default_factory=NoVoices)
    choose_model: ModelResolver = model_by_name
    read_text: TextResolver = read_plainly
    time_words: WordTimer | None = None  # None: no times of words
    prepare_recording: Decode | None = None  # None: recordings stay as they are
    lexicon_for_all: Callable[[], Awaitable[Any]] | None = None  # a Lexicon of the extension `text`
    # Fields of SpeechBody that have an effect here beside the core's own, and further fields of requests.
    fields: set[str] = field(default_factory=set)
    further_fields: Names = field(default_factory=dict)
    steps: dict[str, Step] = field(default_factory=dict)  # the last ones to each utterance, by extension
    on_discard: list[Callable[[Utterance], None]] = field(default_factory=list)  # called for speech that is not sent

    async def resolved(self, draft: Draft) -> Draft:
        """After the steps of all extensions. Raises StepFailed, and TalkrayError that a step raises."""
        for name, step in self.steps.items():
            try:
                draft = await step(draft)
            except TalkrayError:
                raise
            except Exception as error:
                raise StepFailed(f"The extension {name} failed on this request.") from error
        return draft
