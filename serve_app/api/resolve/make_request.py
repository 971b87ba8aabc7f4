"""`SpeechRequest`s from the fields of a client's body or message.

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
from serve_app.api.parsing.field_names import with_client_names
from serve_app.api.parsing.speech_body import SpeechBody, names_of, parse_speech
from serve_app.api.resolve.ignored_fields import Ignored, without_effect
from serve_app.api.resolve.resolver import Resolver
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest, negotiate
from serve_app.api.resolve.voice import choose_voice
from serve_app.api.voice_source import ChosenVoice
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
    overrides, names = overrides or {}, names_of(resolver.body)
    translated, unread = resolver.translate(fields)
    sent = {**translated, **overrides}
    present = {name: sent[name] for name in names if sent.get(name) is not None}
    body = parse_speech(resolver.body, present, resolver.settings)
    info = await resolver.choose_model(resolver, dict(body), sent=fields)
    voice = await choose_voice(resolver, body.voice, body, info, lenient=False)
    reasons = {**(reasons or {}), **voice.ignored, **unread}
    delivery = negotiate(body, accept, default=default)
    if body.word_timestamps and not delivery.events and "word_timestamps" not in overrides:
        reasons["word_timestamps"] = "only events contain words. Set stream_format to sse"
        body = body.model_copy(update={"word_timestamps": False})
    ignored = Ignored(fields, {**names, **resolver.spellings}, reasons)
    return await complete(resolver, body, info, delivery=delivery, ignored=ignored, voice=voice)


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
    client_names = field_names.client_names(sent, names)
    renamed = {**field_names.renamed(sent, names), **(overrides or {})}
    model, named, bit_rate = (renamed.pop(name, None) for name in ("model", "voice", "bit_rate"))
    hints = {**renamed, "model": model, "voice": named}
    # A name that is not a string is reported instead of refused.
    present = {name: value for name, value in renamed.items() if value is not None}
    present |= {name: value for name, value in (("model", model), ("voice", named)) if isinstance(value, str)}
    with with_client_names(client_names):
        info = await resolver.choose_model(resolver, hints, sent=sent, lenient=True)
        body = parse_speech(resolver.body, {"input": "", "any_language": True, **present}, resolver.settings)
        voice = await choose_voice(resolver, named, body, info, lenient=True)
        reasons = {**(reasons or {}), **voice.ignored}
        if model is not None and not catalogue.is_known(model, info, resolver.settings):
            reasons["model"] = f"the loaded model is {info.name}"
        if bit_rate is not None and not delivery.has_bit_rate:
            reasons["bit_rate"] = f"{delivery.audio_format} has no bit rate"
        delivery = replace(delivery, speed=body.speed, sample_rate=body.sample_rate or delivery.sample_rate)
        ignored = Ignored(sent, names, reasons)
        speech = await complete(resolver, body, info, delivery=delivery, ignored=ignored, voice=voice)
        if delivery.bit_rate is not None:
            check_bit_rate(delivery.audio_format, delivery.bit_rate)
    return replace(speech, fields=client_names)


async def complete(
    resolver: Resolver, body: SpeechBody, info: ModelInfo, *, delivery: Delivery, ignored: Ignored, voice: ChosenVoice
) -> SpeechRequest:
    """Complete a request: read the text, use its style tag to select the recording, and list the fields without effect.

    `body` was parsed for the model `info`. Raises the errors of `Resolver.read_text`.
    """
    spoken, unread = await resolver.read_text(resolver, body, info, voice.stored)
    is_tagged, instructions = voice.stored is not None and bool(spoken.style), body.instructions
    if is_tagged:
        if instructions is not None:
            unread = {"instructions": "a style tag in the text selected the recording"} | unread
        instructions = spoken.style
    unused = dict(without_effect(body, info, voice=voice, instructions=instructions))
    for each in resolver.unused:
        unused |= each(body, info, voice)
    if body.word_timestamps and resolver.time_words is None:
        unused["word_timestamps"] = "no loaded extension reads this field"
    return SpeechRequest(
        info,
        body,
        replace(delivery, disclosed=resolver.settings.disclose_synthetic),
        ignored.by_client_name({**unused, **ignored.reasons, **unread}, resolver.further_fields),
        spoken=spoken,
        voice=voice,
        instructions=instructions,
        is_tagged=is_tagged,
        word_times=body.word_timestamps and resolver.time_words is not None,
    )
