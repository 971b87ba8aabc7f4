"""Resolution of requests with one server's models, settings and voices. Extensions replace decisions and add steps."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Protocol

from deployments.protocol import ModelInfo
from serve_app.api import catalogue
from serve_app.api.parsing.field_names import Names
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.resolve.ignored_fields import Reasons, of_text
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.api.voice_source import ChosenVoice, ClonedVoice, NoVoices, VoiceSource
from serve_app.audio.clone_prompts import Decode
from serve_app.config import ApiSettings
from serve_app.speech.observers import WordSource
from serve_app.speech.segments import Utterance
from serve_app.speech.speech_models import SpeechModels
from serve_app.text.characters import clean
from serve_app.text.spoken import SPOKEN_FORMS, UNSPOKEN, SpokenText, TextSpan


class WordTimer(Protocol):
    """Determines the timestamp of each word in a text."""

    def __call__(self, source: SpokenText, info: ModelInfo, *, speed: float = 1.0) -> WordSource: ...


class ChooseModel(Protocol):
    """Chooses the model of a request. See `choose_named_model`."""

    async def __call__(
        self, resolver: "Resolver", hints: Mapping[str, object], *, sent: Mapping[str, object], lenient: bool = False
    ) -> ModelInfo: ...


Step = Callable[[SpeechRequest, Utterance], Awaitable[Utterance]]
ReadText = Callable[["Resolver", SpeechBody, ModelInfo, ClonedVoice | None], Awaitable[tuple[SpokenText, Reasons]]]


async def choose_named_model(
    resolver: "Resolver", hints: Mapping[str, object], *, sent: Mapping[str, object], lenient: bool = False
) -> ModelInfo:
    """Return the model that `hints` name, or the default model.

    `hints`: SpeechBody fields, not validated yet if `lenient`. An unknown model name is then ignored. `sent`: the
    client's fields, which extensions may read. Raises InvalidRequest, ModelNotFound, NotReady.
    """
    models, name = await resolver.models.infos(), hints.get("model")
    if not isinstance(name, str):
        return models[0]
    named = next((info for info in models if catalogue.matches_model(name, info)), models[0])
    if not lenient and not catalogue.is_known(name, named, resolver.settings):
        raise catalogue.not_loaded(name, models, resolver.settings)
    return named


async def read_plain_text(
    resolver: "Resolver", body: SpeechBody, info: ModelInfo, stored: ClonedVoice | None
) -> tuple[SpokenText, Reasons]:
    """Return the spoken part of `body.input`, and why the rest of it and some related fields have no effect.

    The text is unchanged, or its numbers and symbols are replaced by the words that the model reads. Raises
    InvalidRequest.
    """
    form = info.spoken_form
    speak, count_lost = map(resolve_name, SPOKEN_FORMS[form]) if form else (clean, lambda text: 0)
    text, lost = speak(body.input), count_lost(body.input)
    spoken = SpokenText(body.input, (TextSpan(text),) if text else (), Counter({UNSPOKEN: lost} if lost else {}))
    return spoken, of_text(spoken)


@dataclass(slots=True)
class Resolver:
    """Resolves the requests of one process. Jobs use a copy with other settings."""

    models: SpeechModels
    settings: ApiSettings
    voices: VoiceSource = field(default_factory=NoVoices)
    # Extensions may replace these functions. Both take the resolver first, because jobs use a copy of it.
    choose_model: ChooseModel = choose_named_model
    read_text: ReadText = read_plain_text
    time_words: WordTimer | None = None  # None: word timestamps are unavailable
    # Returns the function that prepares the request's recording, or None to use it as it is.
    preparation: Callable[[SpeechBody], Decode | None] = lambda body: None
    lexicon_for_all: Callable[[], Awaitable[Any]] | None = None  # returns a Lexicon of the extension `text`
    body: type[SpeechBody] = SpeechBody  # extensions add their fields `with_fields`
    # Replaces other servers' names in a body of the core's dialect, and returns reasons for fields without effect.
    translate: Callable[[Mapping[str, object]], tuple[dict[str, object], Reasons]] = lambda fields: (dict(fields), {})
    spellings: Names = field(default_factory=dict)  # the names that `translate` replaces
    further_fields: Names = field(default_factory=dict)  # names of additional fields, in all dialects
    # Return the fields of extensions that have no effect on a request, and the reasons.
    unused: list[Callable[[SpeechBody, ModelInfo, ChosenVoice], Reasons]] = field(default_factory=list)
    steps: dict[str, Step] = field(default_factory=dict)  # the final steps for each utterance, by extension
    on_discard: list[Callable[[Utterance], None]] = field(default_factory=list)  # called if the speech is not sent
