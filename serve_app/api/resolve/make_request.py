"""Resolution of a client's fields to a `SpeechRequest`, and of a `SpeechRequest` to an utterance for the replicas.

`strict_request` is for clients written for this server, with its own models and voices: an unknown name is an error.
`lenient_request` is for clients of other services, which use other names. It replaces unknown names with the default
and reports this in `SpeechRequest.ignored`. If a dialect needs to translate its fields, it does so in a function
`speech_request`, which calls one of these two. `build_utterance` follows when the speech begins, because a WebSocket
speaks many texts with one request.
"""

import asyncio
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from deployments.errors import InvalidRequest
from deployments.protocol import DRAWING_OPTIONS, SUBTALKER, ModelInfo, ModelKind, Reference, Sampling, SynthesisRequest
from serve_app.api import catalogue
from serve_app.api.parsing import field_names
from serve_app.api.parsing.field_names import with_client_names
from serve_app.api.parsing.speech_body import (
    ALL_SPELLINGS,
    EXTENSION_FIELDS,
    SPEECH,
    SpeechBody,
    check_length,
    in_our_spelling,
    parse_speech,
)
from serve_app.api.resolve.ignored_fields import Ignored
from serve_app.api.resolve.resolver import Draft, Resolver
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest, negotiate
from serve_app.api.resolve.voice import (
    NO_CLONES,
    ChosenVoice,
    check_language,
    choose_voice,
    language_reason,
    not_spoken,
    speaks,
    unspoken_script,
)
from serve_app.audio.formats import AudioFormat, check_bit_rate
from serve_app.audio.recordings import prepare_reference
from serve_app.config import ApiSettings
from serve_app.speech.segments import Utterance, draw_seed
from serve_app.text.characters import clean
from serve_app.text.languages import AUTO, DETECT, detected, language_name
from serve_app.text.spoken import UNSPOKEN

_FOR_CLONING = ("ref_text", "x_vector_only_mode", "prepare")
# Limit on how much text may grow when numbers and symbols are written as words. Prose with many numbers grows by less
# than half, while digits alone grow fivefold.
_MOST_GROWTH = 2


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
    sent = {**in_our_spelling(fields), **overrides}
    present = {name: sent[name] for name in SPEECH if sent.get(name) is not None}
    body = parse_speech(present, resolver.settings)
    info = await resolver.choose_model(resolver, dict(body), task_type=fields.get("task_type"))
    voice = await choose_voice(resolver, body.voice, body, info, lenient=False)
    ignored = Ignored(fields, ALL_SPELLINGS, {**(reasons or {}), **voice.ignored})
    if isinstance(options := fields.get("normalization_options"), dict) and set(options) - {"normalize"}:
        ignored.reasons["normalization_options"] = "only the option normalize has an effect"
    delivery = negotiate(body, accept, default=default)
    if body.word_timestamps and not delivery.events and "word_timestamps" not in overrides:
        ignored.reasons["word_timestamps"] = "only events contain words. Set stream_format to sse"
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
    client_names = field_names.client_names(sent, names)
    renamed = {**field_names.renamed(sent, names), **(overrides or {})}
    model, named, bit_rate = (renamed.pop(name, None) for name in ("model", "voice", "bit_rate"))
    hints = {**renamed, "model": model, "voice": named}
    present = {name: value for name, value in renamed.items() if value is not None}
    with with_client_names(client_names):
        info = await resolver.choose_model(resolver, hints, task_type=sent.get("task_type"), lenient=True)
        body = parse_speech({"input": "", "any_language": True, **present}, resolver.settings)
        voice = await choose_voice(resolver, named, body, info, lenient=True)
        ignored = Ignored(sent, names, {**(reasons or {}), **voice.ignored})
        if model is not None and not catalogue.is_known(model, info, resolver.settings):
            ignored.reasons["model"] = f"the loaded model is {info.name}"
        if bit_rate is not None and not delivery.has_bit_rate:
            ignored.reasons["bit_rate"] = f"{delivery.audio_format} has no bit rate"
        delivery = replace(delivery, speed=body.speed, sample_rate=body.sample_rate or delivery.sample_rate)
        body = body.model_copy(update={"voice": named or None, "model": model})
        speech = await complete_request(resolver, body, info, delivery=delivery, ignored=ignored, voice=voice)
        if delivery.bit_rate is not None:
            check_bit_rate(delivery.audio_format, delivery.bit_rate)
    return replace(speech, fields=client_names)


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
            ignored.reasons["instructions"] = "a style tag in the text selected the recording"
        body = body.model_copy(update={"instructions": spoken.style})
    ignored.reasons.update(unread)
    delivery = replace(delivery, disclosed=resolver.settings.disclose_synthetic)
    speech = SpeechRequest(
        info, body, delivery, {}, spoken=spoken, stored=stored, is_tagged=is_tagged, chosen_voice=chosen_voice
    )
    reasons = ignored.reasons_for(dict(without_effect(speech, resolver.fields)), resolver.further_fields)
    if resolver.time_words is None:  # `reasons` lists this field
        body = body.model_copy(update={"word_timestamps": False})
    return replace(speech, body=body, ignored=reasons)


def without_effect(speech: SpeechRequest, read: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield fields that have no effect with this model and voice, or alongside other fields, and why. A later reason
    for the same field takes precedence. `read`: fields of EXTENSION_FIELDS that an extension reads.
    """
    body, info, stored, sent = speech.body, speech.info, speech.stored, speech.body.model_fields_set
    if info.kind is not ModelKind.CUSTOM_VOICE and body.voice is not None and stored is None:
        yield "voice", "the loaded model has no named voices"
    is_followed = info.supports_instructions or (stored is not None and stored.has_style(body.instructions))
    if body.instructions and not is_followed:
        yield "instructions", "the loaded model does not follow instructions"
    if info.kind is not ModelKind.BASE:
        yield from ((name, "the loaded model does not clone voices") for name in _FOR_CLONING if name in sent)
    elif body.ref_text is not None and info.clones_by_vector:
        yield "ref_text", "the loaded model uses only the speaker embedding of a recording"
    elif body.ref_text is not None and body.x_vector_only_mode:
        yield "ref_text", "x_vector_only_mode is true"
    for switch, prefix in (("do_sample", ""), ("subtalker_dosample", SUBTALKER)):
        if getattr(body, switch) is False:
            options = (prefix + option for option in DRAWING_OPTIONS)
            yield from ((name, f"{switch} is false") for name in options if name in sent)
    if (reason := language_reason(body, info, _language(speech))) is not None:
        yield "language", reason
    for name in EXTENSION_FIELDS:
        if name in sent and getattr(body, name) and name not in read:
            yield name, "no loaded extension reads this field"
    if stored is not None and body.ref_text is not None:
        yield "ref_text", "the stored voice has its own transcript"
    if stored is not None and body.prepare is not None:
        yield "prepare", "only applies to recordings in the request"


async def build_utterance(
    resolver: Resolver,
    speech: SpeechRequest,
    *,
    request_id: str,
    client: str,
    live: bool = False,
) -> Draft:
    """Build one utterance for the request's model and run the steps of all extensions.

    Set `live` for a request whose text arrives later. Any other request may contain no speakable text, such as "...":
    see `is_speakable`. Raises InvalidRequest naming the field, and the errors of `Resolver.run_steps`.
    """
    with with_client_names(speech.fields):
        utterance = await _utterance(resolver, speech, request_id, client, live=live)
        return await resolver.run_steps(Draft(speech, utterance))


async def _utterance(
    resolver: Resolver, speech: SpeechRequest, request_id: str, client: str, *, live: bool
) -> Utterance:
    body, info, spoken = speech.body, speech.info, speech.spoken
    speaker = body.voice if info.kind is ModelKind.CUSTOM_VOICE else None
    if body.ref_audio is not None and info.kind is not ModelKind.BASE:
        # Check this before checking for a missing `voice`, because that error would be misleading.
        raise InvalidRequest(f"{NO_CLONES.format(info.name)}.", "ref_audio")
    if (language := _language(speech)) is None and not body.any_language:
        raise not_spoken("language", f"{body.language[:80]!r} is not supported", info, speaker)
    text = "" if live else _text(speech, resolver.settings, language=language, speaker=speaker)
    if by_segment := language == DETECT and not live:
        language = await asyncio.to_thread(detected, spoken.text, info.languages)
    synthesis = SynthesisRequest(
        request_id=request_id,
        client=client,
        voice=speaker,
        text=text,
        language=AUTO if language in (None, DETECT) else language,
        instructions=_instructions(speech, resolver.settings),
        reference=await _reference(resolver, speech),
        sampling=_sampling(speech),
        seed=draw_seed() if body.seed is None else body.seed,
        non_streaming_mode=body.non_streaming_mode,
        ignore_eos=body.ignore_eos,
        leading_silence=body.leading_silence,
        word_times=body.word_timestamps,
        model=info.route,
    )
    return Utterance(
        synthesis,
        spans=() if live else spoken.spans,
        max_segment_chars=spoken.max_segment_chars,
        languages=info.languages if by_segment else (),
        may_redraw=body.seed is None and not body.ignore_eos,
    )


def _missing(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is required: {reason}.", param, "missing_required_parameter")


def _language(speech: SpeechRequest) -> str | None:
    """Return one of the model's languages, AUTO or DETECT, or None if the model does not speak the language."""
    body, languages, named = speech.body, speech.info.languages, speech.body.language
    if speech.stored is not None and "language" not in body.model_fields_set:
        default = language_name(speech.stored.language or "")
        named = default if default in languages else named
    language = language_name(named)
    return language if language in (AUTO, DETECT, *languages) else None


def _sampling(speech: SpeechRequest) -> Sampling:
    """Return the sampling options of the request, with the defaults of its stored voice."""
    sent, defaults = speech.body.sampling, {} if speech.stored is None else speech.stored.sampling
    return replace(sent, **{name: value for name, value in defaults.items() if getattr(sent, name) is None})


def _cleaned(param: str, text: str | None, settings: ApiSettings) -> str | None:
    """Clean a text. Return None if the text is missing or has nothing to speak."""
    if not text:
        return None
    check_length(param, text, settings)
    return clean(text) or None


def _text(speech: SpeechRequest, settings: ApiSettings, *, language: str | None, speaker: str | None) -> str:
    """Return the text for the model. It may have no speakable content. Raises InvalidRequest."""
    body, info, spoken, text = speech.body, speech.info, speech.spoken, speech.spoken.text
    is_unspoken = not text and spoken.has_words
    if is_unspoken and (error := unspoken_script(spoken.sent, info, speaker)) is not None:
        raise error
    if language in (AUTO, DETECT):
        check_language(body.input, body, info, speaker)
    names = ", ".join(kind for kind in spoken.left_out if kind != UNSPOKEN)
    if names and is_unspoken and not body.any_language:
        raise InvalidRequest(f'input: all text is left out ({names}). Set "markup" to "none" to read it.', "input")
    if not clean(body.input) or (is_unspoken and not names):
        raise InvalidRequest(f"input has no characters that can be spoken; {speaks(info, speaker)}.", "input")
    if len(text) > (most := _MOST_GROWTH * settings.max_input_chars):
        message = f"input has {len(text)} characters after normalization. Use at most {most}, or split the text."
        raise InvalidRequest(message, "input", "string_above_max_length")
    return text


def _instructions(speech: SpeechRequest, settings: ApiSettings) -> str | None:
    """Return the instructions for the model. Like the official package, ignore instructions that the checkpoint cannot
    follow.
    """
    if not speech.info.supports_instructions:
        return None
    instructions = _cleaned("instructions", speech.body.instructions, settings)
    if speech.info.kind is ModelKind.VOICE_DESIGN and instructions is None:
        raise _missing("instructions", "the loaded model creates the voice from instructions")
    return instructions


async def _reference(resolver: Resolver, speech: SpeechRequest) -> Reference | None:
    body, info, stored = speech.body, speech.info, speech.stored
    if info.kind is not ModelKind.BASE:
        return None
    by_vector = body.x_vector_only_mode or info.clones_by_vector
    if stored is not None:
        return await resolver.voices.reference(stored, body.instructions, info, x_vector_only=by_vector)
    if body.ref_audio is None:
        named = f"no voice {body.voice[:80]!r} is stored, and " if body.voice else ""
        remedy = "Send ref_audio, or set voice to a stored voice"
        raise _missing("ref_audio", f"{named}the loaded model clones the voice of a recording. {remedy}")
    text = _cleaned("ref_text", body.ref_text, resolver.settings)
    if text is None and not by_vector:
        raise _missing("ref_text", "send the transcript of ref_audio, or set x_vector_only_mode to true")
    prepare = resolver.prepare_recording if body.prepare == "auto" else None
    return await prepare_reference(body.ref_audio, text, info, x_vector_only=by_vector, prepare=prepare)
