"""Resolution of a client's fields into a `SpeechRequest`, with one server's models, settings, voices and extensions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pkgutil import resolve_name
from typing import ClassVar, Protocol, TypeVar

from pydantic import BaseModel

from deployments.protocol import ModelInfo
from serve_app.api import catalogue
from serve_app.api.parsing import field_names
from serve_app.api.parsing.field_names import Names, with_client_names
from serve_app.api.parsing.speech_body import SpeechBody, names_of, parse_speech, with_fields
from serve_app.api.resolve.ignored_fields import Ignored, Reasons, of_text, without_effect
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest, negotiate
from serve_app.api.resolve.voice import choose_voice
from serve_app.api.voice_source import ChosenVoice, ClonedVoice, VoiceSource
from serve_app.audio.clone_prompts import Decode
from serve_app.audio.formats import AudioFormat, check_bit_rate
from serve_app.config import ApiSettings
from serve_app.speech.observers import WordSource
from serve_app.speech.segments import Utterance
from serve_app.speech.speech_models import SpeechModels
from serve_app.text.characters import clean
from serve_app.text.spoken import SPOKEN_FORMS, UNSPOKEN, SpokenText, TextSpan

T = TypeVar("T")
Fields = Mapping[str, object]


class WordTimer(Protocol):
    """Determines the timestamp of each word in a text."""

    def __call__(self, source: SpokenText, info: ModelInfo, *, speed: float = 1.0) -> WordSource: ...


class RequestHooks:
    """Changes to how requests are resolved, by one extension. Override attributes and methods as needed.

    If several extensions make the same decision, the last one makes it (`in_order` in extension.py). None means no
    decision.
    """

    body_fields: ClassVar[type[BaseModel] | None] = None  # fields to add to the body: see `SpeechBody.of`
    spellings: ClassVar[Names] = {}  # the names that `translate` replaces
    time_words: ClassVar[WordTimer | None] = None

    def further_fields(self, models: SpeechModels) -> Names:
        """Return names of additional fields, which all dialects accept."""
        return {}

    def translate(self, fields: Fields) -> tuple[dict[str, object], Reasons]:
        """Replace other servers' names in a body of the core's dialect, and return reasons for fields without effect.
        Raises InvalidRequest.
        """
        return dict(fields), {}

    async def choose_model(
        self, resolver: "Resolver", hints: Fields, *, sent: Fields, lenient: bool
    ) -> ModelInfo | None:
        """Choose the model of a request. See `Resolver.choose_model`."""
        return None

    async def read_text(
        self, resolver: "Resolver", body: SpeechBody, info: ModelInfo, stored: ClonedVoice | None
    ) -> tuple[SpokenText, Reasons] | None:
        """Determine the spoken text of a request that contains it. See `Resolver.read_text`."""
        return None

    def preparation(self, body: SpeechBody) -> Decode | None:
        """Return the function that decodes and prepares the recording in a request."""
        return None

    def unused(self, body: SpeechBody, info: ModelInfo, voice: ChosenVoice) -> Reasons:
        """Return the fields of the extension that have no effect on a request, and the reasons."""
        return {}

    async def resolve(self, resolver: "Resolver", speech: SpeechRequest, utterance: Utterance) -> Utterance:
        """Change an utterance before it is spoken, after the hooks of earlier extensions. Errors other than
        TalkrayError become status 500 with the extension's name.
        """
        return utterance

    def discard(self, utterance: Utterance) -> None:
        """Discard an utterance that was synthesized but will not be sent."""


class Resolver:
    """Resolves requests. There is one per process; jobs use a second one with other settings.

    `strict_request` is for clients written for this server, with its own models and voices: an unknown name is an
    error. `lenient_request` is for clients of other services, which use other names. It replaces unknown names with the
    default and reports this in `SpeechRequest.ignored`. If a dialect needs to translate its fields, it does so in a
    function `speech_request`, which calls one of these two.
    """

    def __init__(
        self, models: SpeechModels, settings: ApiSettings, hooks: Sequence[tuple[str, RequestHooks]] = ()
    ) -> None:
        """`hooks`: those of all extensions, each with the extension's name, in the order in which they run."""
        self.models, self.settings, self.hooks = models, settings, hooks
        self._hooks = every = [each for _, each in hooks]
        self._last_first = every[::-1]
        self.voices: VoiceSource = self.provider(VoiceSource) or VoiceSource()
        self.body = reduce(with_fields, [each.body_fields for each in every if each.body_fields], SpeechBody)
        self.time_words = next((each.time_words for each in self._last_first if each.time_words is not None), None)
        self.further_fields = {name: ours for each in every for name, ours in each.further_fields(models).items()}
        self._spellings = {name: ours for each in every for name, ours in each.spellings.items()}

    def provider(self, kind: type[T]) -> T | None:
        """Return the hooks that are a `kind`, which the core or another extension defines and calls."""
        return next((each for each in self._last_first if isinstance(each, kind)), None)

    def with_settings(self, settings: ApiSettings) -> "Resolver":
        return Resolver(self.models, settings, self.hooks)

    async def strict_request(
        self,
        sent: Fields,
        *,
        accept: str = "",
        default: AudioFormat = AudioFormat.MP3,
        overrides: Fields | None = None,
        reasons: Mapping[str, str] | None = None,
    ) -> SpeechRequest:
        """Build a request from a client written for this server's models and voices. Unknown names are errors.

        `sent`: SpeechBody fields as sent. `accept`: the Accept header. `default`: the format if neither the body nor
        `accept` names one. `overrides`: fields that the dialect sets itself. `reasons`: why fields have no effect, by
        field name. Raises InvalidRequest, ModelNotFound, NotReady.
        """
        overrides, names = overrides or {}, names_of(self.body)
        translated, unread = self._translate(sent)
        fields = {**translated, **overrides}
        present = {name: fields[name] for name in names if fields.get(name) is not None}
        body = parse_speech(self.body, present, self.settings)
        info = await self.choose_model(dict(body), sent=sent)
        voice = await self.choose_voice(body.voice, body, info)
        reasons = {**(reasons or {}), **voice.ignored, **unread}
        delivery = negotiate(body, accept, default=default)
        if body.word_timestamps and not delivery.events and "word_timestamps" not in overrides:
            reasons["word_timestamps"] = "only events contain words. Set stream_format to sse"
            body = body.model_copy(update={"word_timestamps": False})
        ignored = Ignored(sent, {**names, **self._spellings}, reasons)
        return await self.complete(body, info, delivery=delivery, ignored=ignored, voice=voice)

    async def lenient_request(
        self,
        sent: Fields,
        names: Names,
        *,
        delivery: Delivery,
        overrides: Fields | None = None,
        reasons: Mapping[str, str] | None = None,
    ) -> SpeechRequest:
        """Build a request from a client of another service that uses that service's model and voice names.

        An unknown model or voice is replaced by the default and listed in `SpeechRequest.ignored`.

        `sent`: flattened fields, as returned by `field_names.flat`. `names`: the dialect's field names. `overrides`:
        SpeechBody fields that the dialect sets itself. `reasons`: why fields have no effect, by field name. Raises
        NotReady, and InvalidRequest naming the client's field.
        """
        client_names = field_names.client_names(sent, names)
        renamed = {**field_names.renamed(sent, names), **(overrides or {})}
        model, named, bit_rate = (renamed.pop(name, None) for name in ("model", "voice", "bit_rate"))
        hints = {**renamed, "model": model, "voice": named}
        # A name that is not a string is reported instead of refused.
        present = {name: value for name, value in renamed.items() if value is not None}
        present |= {name: value for name, value in (("model", model), ("voice", named)) if isinstance(value, str)}
        with with_client_names(client_names):
            info = await self.choose_model(hints, sent=sent, lenient=True)
            body = parse_speech(self.body, {"input": "", "any_language": True, **present}, self.settings)
            voice = await self.choose_voice(named, body, info, lenient=True)
            reasons = {**(reasons or {}), **voice.ignored}
            if model is not None and not catalogue.is_known(model, info, self.settings):
                reasons["model"] = f"the loaded model is {info.name}"
            if bit_rate is not None and not delivery.has_bit_rate:
                reasons["bit_rate"] = f"{delivery.audio_format} has no bit rate"
            delivery = replace(delivery, speed=body.speed, sample_rate=body.sample_rate or delivery.sample_rate)
            ignored = Ignored(sent, names, reasons)
            speech = await self.complete(body, info, delivery=delivery, ignored=ignored, voice=voice)
            if delivery.bit_rate is not None:
                check_bit_rate(delivery.audio_format, delivery.bit_rate)
        return replace(speech, fields=client_names)

    async def complete(
        self, body: SpeechBody, info: ModelInfo, *, delivery: Delivery, ignored: Ignored, voice: ChosenVoice
    ) -> SpeechRequest:
        """Complete a request: read the text, use its style tag to select the recording, and list the fields without
        effect.

        `body` was parsed for the model `info`. Raises the errors of `read_text`.
        """
        spoken, unread = await self.read_text(body, info, voice.stored)
        is_tagged, instructions = voice.stored is not None and bool(spoken.style), body.instructions
        if is_tagged:
            if instructions is not None:
                unread = {"instructions": "a style tag in the text selected the recording"} | unread
            instructions = spoken.style
        unused = dict(without_effect(body, info, voice=voice, instructions=instructions))
        for each in self._hooks:
            unused |= each.unused(body, info, voice)
        if body.word_timestamps and self.time_words is None:
            unused["word_timestamps"] = "no loaded extension reads this field"
        return SpeechRequest(
            info,
            body,
            replace(delivery, disclosed=self.settings.disclose_synthetic),
            ignored.by_client_name({**unused, **ignored.reasons, **unread}, self.further_fields),
            spoken=spoken,
            voice=voice,
            instructions=instructions,
            is_tagged=is_tagged,
            word_times=body.word_timestamps and self.time_words is not None,
        )

    async def choose_model(self, hints: Fields, *, sent: Fields, lenient: bool = False) -> ModelInfo:
        """Choose the model of a request. Without extensions, it is the one that `hints` name, or the default model.

        `hints`: SpeechBody fields, not validated yet if `lenient`. An unknown model name is then ignored. `sent`: the
        client's fields, which extensions may read. Raises InvalidRequest, ModelNotFound, NotReady.
        """
        for each in self._last_first:
            if (info := await each.choose_model(self, hints, sent=sent, lenient=lenient)) is not None:
                return info
        models, name = await self.models.infos(), hints.get("model")
        if not isinstance(name, str):
            return models[0]
        named = next((info for info in models if catalogue.matches_model(name, info)), models[0])
        if not lenient and not catalogue.is_known(name, named, self.settings):
            raise catalogue.not_loaded(name, models, self.settings)
        return named

    async def choose_voice(
        self, named: object, body: SpeechBody, info: ModelInfo, *, lenient: bool = False
    ) -> ChosenVoice:
        """Choose the voice that the client `named`, or the default voice. See voice.py."""
        default = self.settings.default_voice
        return await choose_voice(self.voices, named, body, info, default=default, lenient=lenient)

    async def read_text(
        self, body: SpeechBody, info: ModelInfo, stored: ClonedVoice | None
    ) -> tuple[SpokenText, Reasons]:
        """Return the spoken part of `body.input`, and why the rest of it and some related fields have no effect.

        Without extensions, the text is unchanged, or its numbers and symbols are replaced by the words that the model
        reads. Raises InvalidRequest.
        """
        for each in self._last_first:
            if (result := await each.read_text(self, body, info, stored)) is not None:
                return result
        form = info.spoken_form
        speak, count_lost = map(resolve_name, SPOKEN_FORMS[form]) if form else (clean, lambda text: 0)
        text, lost = speak(body.input), count_lost(body.input)
        spoken = SpokenText(body.input, (TextSpan(text),) if text else (), Counter({UNSPOKEN: lost} if lost else {}))
        return spoken, of_text(spoken)

    def preparation(self, body: SpeechBody) -> Decode | None:
        """Return the function that prepares the request's recording, or None to use it as it is."""
        return next((decode for each in self._last_first if (decode := each.preparation(body)) is not None), None)

    def _translate(self, fields: Fields) -> tuple[Fields, Reasons]:
        reasons: Reasons = {}
        for each in self._hooks:
            fields, more = each.translate(fields)
            reasons |= more
        return fields, reasons
