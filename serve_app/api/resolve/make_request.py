"""Conversion of a client's fields to a `SpeechRequest`.

`strict_request` is for clients written for this server, with its own models and voices: an unknown name is an error.
`lenient_request` is for clients of other services, which use other names. It replaces unknown names with the default
and reports this in `SpeechRequest.ignored`. If a dialect needs to translate its fields, it does so in a function
`speech_request`, which calls one of these two.
"""

from collections.abc import Mapping
from dataclasses import replace

from deployments.protocol import ModelInfo
from serve_app.api import catalogue
from serve_app.api.parsing import field_names
from serve_app.api.parsing.field_names import in_their_words
from serve_app.api.parsing.speech_body import ALL_SPELLINGS, SPEECH, SpeechBody, in_our_spelling, parse_speech
from serve_app.api.resolve.ignored_fields import Ignored
from serve_app.api.resolve.resolver import Resolver
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest, negotiate
from serve_app.api.resolve.voice import ChosenVoice, choose_voice
from serve_app.audio.formats import AudioFormat, check_bit_rate


async def strict_request(
    resolver: Resolver,
    fields: Mapping[str, object],
    *,
    accept: str = "",
    default: AudioFormat = AudioFormat.MP3,
    overrides: Mapping[str, object] | None = None,
    reasons: Mapping[str, str] | None = None,
) -> SpeechRequest:
    """Build a request from a client written for this server's models and voices. Unknown names are errors.

    `fields`: SpeechBody fields as sent. `accept`: the Accept header. `default`: the format if neither the body nor
    `accept` names one. `overrides`: fields that the dialect sets itself. `reasons`: why fields have no effect, by field
    name. Raises InvalidRequest, ModelNotFound, NotReady.
    """
    overrides = overrides or {}
    ignored = Ignored(fields, ALL_SPELLINGS, reasons)
    sent = {**in_our_spelling(fields), **overrides}
    present = {name: sent[name] for name in SPEECH if sent.get(name) is not None}
    body = parse_speech(present, resolver.settings)
    info = await resolver.choose_model(resolver, dict(body), task_type=fields.get("task_type"))
    voice = await choose_voice(resolver, body.voice, body, info, lenient=False)
    ignored.note("voice", voice.reason)
    if isinstance(options := fields.get("normalization_options"), dict) and set(options) - {"normalize"}:
        ignored.note("normalization_options", "only the option normalize has an effect")
    delivery = negotiate(body, accept, default=default)
    if body.word_timestamps and not delivery.events and "word_timestamps" not in overrides:
        ignored.note("word_timestamps", "only events contain words. Set stream_format to sse")
        body = body.model_copy(update={"word_timestamps": False})
    return await complete_request(resolver, body, info, delivery=delivery, ignored=ignored, voice=voice)


async def lenient_request(
    resolver: Resolver,
    sent: Mapping[str, object],
    names: field_names.Names,
    *,
    delivery: Delivery,
    overrides: Mapping[str, object] | None = None,
    reasons: Mapping[str, str] | None = None,
) -> SpeechRequest:
    """Build a request from a client of another service that uses that service's model and voice names.

    An unknown model or voice is replaced by the default and listed in `SpeechRequest.ignored`.

    `sent`: flattened fields, as returned by `field_names.flat`. `names`: the dialect's field names. `overrides`:
    SpeechBody fields that the dialect sets itself. `reasons`: why fields have no effect, by field name. Raises
    NotReady, and InvalidRequest naming the client's field.
    """
    ignored, theirs = Ignored(sent, names, reasons), field_names.theirs(sent, names)
    renamed = {**field_names.renamed(sent, names), **(overrides or {})}
    model, named, bit_rate = (renamed.pop(name, None) for name in ("model", "voice", "bit_rate"))
    hints = {**renamed, "model": model, "voice": named}
    present = {name: value for name, value in renamed.items() if value is not None}
    with in_their_words(theirs):
        info = await resolver.choose_model(resolver, hints, task_type=sent.get("task_type"), lenient=True)
        body = parse_speech({"input": "", "any_language": True, **present}, resolver.settings)
        voice = await choose_voice(resolver, named, body, info, lenient=True)
        ignored.note("voice", voice.reason)
        if model is not None and not catalogue.is_known(model, info, resolver.settings):
            ignored.note("model", f"the loaded model is {info.name}")
        if bit_rate is not None and not delivery.has_bit_rate:
            ignored.note("bit_rate", f"{delivery.audio_format} has no bit rate")
        delivery = replace(delivery, speed=body.speed, sample_rate=body.sample_rate or delivery.sample_rate)
        body = body.model_copy(update={"voice": named or None, "model": model})
        speech = await complete_request(resolver, body, info, delivery=delivery, ignored=ignored, voice=voice)
        if delivery.bit_rate is not None:
            check_bit_rate(delivery.audio_format, delivery.bit_rate)
    return replace(speech, fields=theirs)


async def request_in_voice(resolver: Resolver, speech: SpeechRequest, voice: str) -> SpeechRequest:
    """Copy a lenient request for another voice. The copy's `ignored` covers only that voice."""
    chosen = await choose_voice(resolver, voice, speech.body, speech.info, lenient=True)
    body = speech.body.model_copy(update={"voice": chosen.name})
    spoken, _ = await resolver.read_text(resolver, body, speech.info, chosen.stored)
    ignored = {"voice": chosen.reason} if chosen.reason else {}
    speech = replace(speech, body=body, ignored=ignored, spoken=spoken, stored=chosen.stored)
    return replace(speech, is_tagged=False, chosen_voice=None)


async def complete_request(
    resolver: Resolver,
    body: SpeechBody,
    info: ModelInfo,
    *,
    delivery: Delivery,
    ignored: Ignored,
    voice: ChosenVoice,
) -> SpeechRequest:
    """Complete a request: read the text, use its style tag to select the recording, and list the fields without effect.

    `body` was parsed for the model `info`. `voice` replaces the voice in `body`. Raises the errors of
    `Resolver.read_text`.
    """
    chosen_voice = None if body.voice else voice.name
    body, stored = body.model_copy(update={"voice": voice.name}), voice.stored
    spoken, unread = await resolver.read_text(resolver, body, info, stored)
    if is_tagged := stored is not None and bool(spoken.style):
        if body.instructions is not None:
            ignored.note("instructions", "a style tag in the text selected the recording")
        body = body.model_copy(update={"instructions": spoken.style})
    ignored.note_all(unread)
    reasons = ignored.reasons_for(body, info, further=resolver.further_fields, read=resolver.fields, stored=stored)
    if resolver.time_words is None:  # `reasons` lists this field
        body = body.model_copy(update={"word_timestamps": False})
    delivery = replace(delivery, disclosed=resolver.settings.disclose_synthetic)
    return SpeechRequest(
        info, body, delivery, reasons, spoken=spoken, stored=stored, is_tagged=is_tagged, chosen_voice=chosen_voice
    )
