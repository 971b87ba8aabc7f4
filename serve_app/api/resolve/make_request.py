"""From the fields that a client sent to its `SpeechRequest`, in one of two ways.

`strict_request` is for clients that can know the models and voices here: an unknown name is an error.
`lenient_request` is for clients of other services, which cannot know them: the default speaks instead, and
`SpeechRequest.ignored` says so. A dialect whose fields need a translation has a function `speech_request`, which
translates them and calls one of the two.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from deployments.errors import InvalidRequest
from deployments.protocol import ModelInfo, ModelKind
from serve_app.api import catalogue
from serve_app.api.parsing import field_names
from serve_app.api.parsing.speech_body import ALL_SPELLINGS, SPEECH, SpeechBody, in_our_spelling, parse_speech
from serve_app.api.resolve.ignored_fields import Ignored
from serve_app.api.resolve.offer import Offer
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest, negotiate
from serve_app.api.voice_source import KeptVoice
from serve_app.audio.formats import AudioFormat, check_bit_rate

_NO_CLONES = "{} does not clone voices: load a Base checkpoint"


async def strict_request(
    offer: Offer,
    fields: Mapping[str, object],
    *,
    accept: str = "",
    default: AudioFormat = AudioFormat.MP3,
    overrides: Mapping[str, object] | None = None,
    reasons: Mapping[str, str] | None = None,
) -> SpeechRequest:
    """The request of a client that can know the models and voices here: unknown names are errors.

    `fields`: a SpeechBody's, as they were sent. `accept`: the Accept header. `default`: the format if neither the
    body nor `accept` names one. `overrides`: fields that the dialect sets itself. `reasons`: why fields have no effect,
    by field. Raises InvalidRequest, ModelNotFound, NotReady.
    """
    overrides = overrides or {}
    ignored = Ignored(fields, ALL_SPELLINGS, reasons)
    sent = {**in_our_spelling(fields), **overrides}
    present = {name: sent[name] for name in SPEECH if sent.get(name) is not None}
    body = parse_speech(present, offer.settings)
    info = await offer.choose_model(offer, dict(body), task_type=fields.get("task_type"))
    if body.voice is not None:
        _check_voice(offer, body.voice, info)
    if isinstance(options := fields.get("normalization_options"), dict) and set(options) - {"normalize"}:
        ignored.note("normalization_options", "of these only normalize has an effect")
    delivery = negotiate(body, accept, default=default)
    body, chosen = await in_a_voice(offer, body, info)
    if body.word_timestamps and not delivery.events and "word_timestamps" not in overrides:
        ignored.note("word_timestamps", "only events carry words: stream_format")
        body = body.model_copy(update={"word_timestamps": False})
    stored = await stored_voice(offer, body, info)
    speech = await complete_request(offer, body, info, delivery=delivery, ignored=ignored, stored=stored)
    return replace(speech, chosen_voice=chosen)


async def in_a_voice(offer: Offer, body: SpeechBody, info: ModelInfo) -> tuple[SpeechBody, str | None]:
    """The body with a voice, and its name if the body named none; a recording, or a description, is the voice."""
    if body.voice is not None or body.ref_audio is not None:
        return body, None
    chosen = (await _lenient_voice(offer, None, body, info)).name
    return (body if chosen is None else body.model_copy(update={"voice": chosen})), chosen


async def lenient_request(
    offer: Offer,
    sent: Mapping[str, object],
    names: field_names.Names,
    *,
    delivery: Delivery,
    overrides: Mapping[str, object] | None = None,
    reasons: Mapping[str, str] | None = None,
) -> SpeechRequest:
    """The request of a client of another service, which cannot know the models and voices here.

    An unknown model or voice becomes the default one, and `SpeechRequest.ignored` names it.

    `sent`: the fields, flat as `field_names.flat` returns them. `names`: the dialect's names of fields. `overrides`:
    fields of a SpeechBody that the dialect sets itself. `reasons`: why fields have no effect, by field. Raises
    InvalidRequest that names the client's field, NotReady.
    """
    try:
        return await _lenient_request(offer, sent, names, delivery=delivery, overrides=overrides, reasons=reasons)
    except InvalidRequest as error:
        raise _in_their_words(error, sent, names) from None


async def _lenient_request(
    offer: Offer,
    sent: Mapping[str, object],
    names: field_names.Names,
    *,
    delivery: Delivery,
    overrides: Mapping[str, object] | None,
    reasons: Mapping[str, str] | None,
) -> SpeechRequest:
    """Raises InvalidRequest that names our field."""
    ignored = Ignored(sent, names, reasons)
    renamed = {**field_names.renamed(sent, names), **(overrides or {})}
    model = renamed.pop("model", None)
    bit_rate = renamed.pop("bit_rate", None)
    named = renamed.pop("voice", None)
    hints = {**renamed, "model": model, "voice": named}
    info = await offer.choose_model(offer, hints, task_type=sent.get("task_type"), lenient=True)
    present = {name: value for name, value in renamed.items() if value is not None}
    unvoiced = parse_speech({"input": "", "any_language": True, **present}, offer.settings)
    voice = await _lenient_voice(offer, named, unvoiced, info)
    ignored.note("voice", voice.reason)
    if model is not None and not catalogue.is_known(model, info, offer.settings):
        ignored.note("model", f"the loaded model is {info.name}")
    if bit_rate is not None and not delivery.has_bit_rate:
        ignored.note("bit_rate", f"{delivery.audio_format} has none")
    body = unvoiced.model_copy(update={"voice": voice.name})
    delivery = replace(delivery, speed=body.speed, sample_rate=body.sample_rate or delivery.sample_rate)
    speech = await complete_request(offer, body, info, delivery=delivery, ignored=ignored, stored=voice.stored)
    if delivery.bit_rate is not None:
        check_bit_rate(delivery.audio_format, delivery.bit_rate)
    return speech if named else replace(speech, chosen_voice=voice.name)


def _in_their_words(error: InvalidRequest, sent: Mapping[str, object], names: field_names.Names) -> InvalidRequest:
    """The error about the client's own field, where that has another name than ours."""
    param = error.param
    theirs = next((name for name, ours in names.items() if ours == param and name in sent), None)
    if param is None or param in sent or theirs is None:
        return error
    theirs = theirs.rpartition(".")[2]  # errors name a field without the objects around it
    return type(error)(re.sub(rf"^{re.escape(param)}\b", theirs, error.message), theirs, error.code)


async def request_in_voice(offer: Offer, speech: SpeechRequest, voice: str) -> SpeechRequest:
    """The same lenient request in another voice; `ignored` is about that voice only."""
    chosen = await _lenient_voice(offer, voice, speech.body, speech.info)
    body = speech.body.model_copy(update={"voice": chosen.name})
    spoken, _ = await offer.read_text(offer, body, speech.info, chosen.stored)
    ignored = {"voice": chosen.reason} if chosen.reason else {}
    return replace(speech, body=body, ignored=ignored, spoken=spoken, stored=chosen.stored, chosen_voice=None)


async def complete_request(
    offer: Offer,
    body: SpeechBody,
    info: ModelInfo,
    *,
    delivery: Delivery,
    ignored: Ignored,
    stored: KeptVoice | None,
) -> SpeechRequest:
    """The last steps to every request: a tag of the text chooses the recording, the text is read, and fields without
    effect are listed.

    `body` was made for the model `info`; the voice `stored` speaks. Raises as `Offer.read_text` does.
    """
    tagged = _tagged(body, stored)
    if tagged is not None and body.instructions is not None:
        ignored.note("instructions", "a tag of the text chose the recording")
    body = tagged or body
    spoken, unread = await offer.read_text(offer, body, info, stored)
    ignored.note_all(unread)
    reasons = ignored.reasons_for(body, info, further=offer.further_fields, read=offer.fields, stored=stored)
    delivery, is_tagged = replace(delivery, disclosed=offer.settings.disclose_synthetic), tagged is not None
    return SpeechRequest(
        info, body, delivery=delivery, ignored=reasons, spoken=spoken, stored=stored, is_tagged=is_tagged
    )


async def stored_voice(offer: Offer, body: SpeechBody, info: ModelInfo) -> KeptVoice | None:
    """The kept voice that `body.voice` means, if the model can speak with it and the request has no recording."""
    is_meant = info.kind is ModelKind.BASE and body.ref_audio is None and body.voice is not None
    return await offer.voices.find(body.voice) if is_meant else None


@dataclass(frozen=True, slots=True)
class _LenientVoice:
    """The voice that speaks for a client that cannot know the voices here."""

    name: str | None  # as `SpeechBody.voice`
    stored: KeptVoice | None
    reason: str | None  # why it is not the one that was named


async def _lenient_voice(offer: Offer, named: object, body: SpeechBody, info: ModelInfo) -> _LenientVoice:
    """The voice that the client `named`, else the nearest one.

    A model that clones speaks with a stored voice, `api.default_voice` if the named one is none. A recording in
    `body` goes before both.
    """
    speaker, reason = _nearest(offer, named, info)
    if info.kind is not ModelKind.BASE:
        return _LenientVoice(speaker, None, reason)
    name = named if isinstance(named, str) else speaker
    if body.ref_audio is not None:
        return _LenientVoice(name, None, reason)
    stored = None if name is None else await offer.voices.find(name)
    if stored is not None:
        return _LenientVoice(name, stored, None)
    default = await offer.voices.find(offer.settings.default_voice)
    if default is None:
        return _LenientVoice(name, None, reason)
    instead = f"no such voice here, {default.name} speaks"
    return _LenientVoice(default.id, default, reason if named is None else instead)


def _check_voice(offer: Offer, voice: str, info: ModelInfo) -> None:
    """Raises InvalidRequest if the loaded model has named voices, and not this one."""
    if info.voices and not catalogue.is_named(voice, info.voices) and offer.voices.known(voice) is not None:
        raise InvalidRequest(f"voice: {voice[:80]!r} is a stored voice, {_NO_CLONES.format(info.name)}.", "voice")
    if info.voices:
        catalogue.resolve(voice, info.voices)


def _nearest(offer: Offer, named: object, info: ModelInfo) -> tuple[str | None, str | None]:
    """The model's speaker for what the client sent as a voice, and the reason if the client meant another one."""
    name = named if isinstance(named, str) else None
    speaker, reason = catalogue.nearest(name, info, offer.settings)
    if named is not None and name is None:
        return speaker, "not a name"
    if reason is not None and info.kind is not ModelKind.BASE and offer.voices.known(name) is not None:
        reason = f"a stored voice, {_NO_CLONES.format(info.name)}"
    return speaker, reason


def _tagged(body: SpeechBody, stored: KeptVoice | None) -> SpeechBody | None:
    """The body without the tag in its text that chooses a recording of the voice; None if the text has no such tag.
    The tag becomes the body's `instructions`, which choose a recording too.
    """
    style, text = (None, body.input) if stored is None else stored.tagged(body.input)
    return None if style is None else body.model_copy(update={"input": text, "instructions": style})
