"""Conversion of a `SpeechRequest` into an utterance, with checks against the selected model."""

import asyncio

from deployments.errors import InvalidRequest
from deployments.protocol import ModelInfo, ModelKind, Reference, SynthesisRequest
from serve_app.api.parsing.field_names import in_their_words
from serve_app.api.parsing.speech_body import SpeechBody, check_length
from serve_app.api.resolve.language import check_language, speaks, spoken_language, unspoken_script
from serve_app.api.resolve.resolver import Draft, Resolver
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.api.resolve.voice import NO_CLONES
from serve_app.api.voice_source import KeptVoice
from serve_app.audio.recordings import read_aside
from serve_app.config import ApiSettings
from serve_app.speech.segments import Segments, Utterance, draw_seed
from serve_app.text.characters import clean
from serve_app.text.languages import AUTO, DETECT, detected, language_name
from serve_app.text.spoken import UNSPOKEN, SpokenText, TextSpan

# Limit on how much text may grow when numbers and symbols are written as words. Prose with many numbers grows by less
# than half, while digits alone grow fivefold.
_MOST_GROWTH = 2


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
    see `is_speakable`. Raises InvalidRequest naming the field, and the errors of `Resolver.resolved`.
    """
    with in_their_words(speech.fields):
        utterance = await _utterance(resolver, speech, request_id, client, live=live)
        return await resolver.resolved(Draft(speech, utterance))


async def _utterance(
    resolver: Resolver, speech: SpeechRequest, request_id: str, client: str, *, live: bool
) -> Utterance:
    settings = resolver.settings
    info, spoken, stored = speech.info, speech.spoken, speech.stored
    if speech.body.ref_audio is not None and info.kind is not ModelKind.BASE:
        # Check this before checking for a missing `voice`, because that error would be misleading.
        raise InvalidRequest(f"{NO_CLONES.format(info.name)}.", "ref_audio")
    body = speech.body if stored is None else _with_defaults(speech.body, stored, info)
    speaker = body.voice if info.kind is ModelKind.CUSTOM_VOICE else None
    language = spoken_language(body, info, speaker)
    by_segment = language == DETECT and not live
    if language == DETECT:
        detected_language = await asyncio.to_thread(detected, spoken.text, info.languages) if by_segment else None
        language = detected_language or AUTO
    synthesis = SynthesisRequest(
        request_id=request_id,
        client=client,
        voice=speaker,
        text="" if live else _text(body, info, settings, spoken, speaker),
        language=language,
        instructions=_instructions(body, info, settings),
        reference=await _reference(resolver, body, info, stored),
        sampling=body.sampling,
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


def segments_of(speech: SpeechRequest) -> list[TextSpan]:
    """Return the segments of the text, each with its preceding silence."""
    spoken = speech.spoken
    max_chars = spoken.max_segment_chars
    synthesis = SynthesisRequest("", spoken.text)
    utterance = Utterance(synthesis, spans=spoken.spans, max_segment_chars=max_chars)
    return Segments.of(utterance, speech.info.max_segment_chars).plan()


def _missing(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is required: {reason}.", param, "missing_required_parameter")


def _cleaned(param: str, text: str | None, settings: ApiSettings) -> str:
    """Clean a text. Return an empty string if the text is missing or has nothing to speak."""
    check_length(param, text or "", settings)
    return clean(text or "")


def _text(body: SpeechBody, info: ModelInfo, settings: ApiSettings, spoken: SpokenText, speaker: str | None) -> str:
    """Return the text for the model. It may have no speakable content. Raises InvalidRequest."""
    text = spoken.text
    is_unspoken = not text and spoken.has_words
    if is_unspoken and (error := unspoken_script(spoken.sent, info, speaker)) is not None:
        raise error
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


def _instructions(body: SpeechBody, info: ModelInfo, settings: ApiSettings) -> str | None:
    """Return the instructions for the model. Like the official package, ignore instructions that the checkpoint cannot
    follow.
    """
    if not info.supports_instructions:
        return None
    instructions = _cleaned("instructions", body.instructions, settings) or None
    if info.kind is ModelKind.VOICE_DESIGN and instructions is None:
        raise _missing("instructions", "the loaded model creates the voice from instructions")
    return instructions


def _with_defaults(body: SpeechBody, stored: KeptVoice, info: ModelInfo) -> SpeechBody:
    """Fill in the stored voice's language and sampling options if the request does not set them."""
    added: dict[str, object] = {name: value for name, value in stored.sampling.items() if getattr(body, name) is None}
    if "language" not in body.model_fields_set and language_name(stored.language or "") in info.languages:
        added["language"] = stored.language
    return body.model_copy(update=added)


async def _reference(
    resolver: Resolver, body: SpeechBody, info: ModelInfo, stored: KeptVoice | None
) -> Reference | None:
    if info.kind is not ModelKind.BASE:
        return None
    by_vector = body.x_vector_only_mode or info.clones_by_vector
    if stored is not None:
        return await resolver.voices.reference(stored, body.instructions, info, x_vector_only=by_vector)
    if body.ref_audio is None:
        named = f"no voice {body.voice[:80]!r} is stored, and " if body.voice else ""
        remedy = "Send ref_audio, or set voice to a stored voice"
        raise _missing("ref_audio", f"{named}the loaded model clones the voice of a recording. {remedy}")
    text = _cleaned("ref_text", body.ref_text, resolver.settings) or None
    if text is None and not by_vector:
        raise _missing("ref_text", "send the transcript of ref_audio, or set x_vector_only_mode to true")
    prepare = resolver.prepare_recording if body.prepare == "auto" else None
    return await read_aside(body.ref_audio, text, info, x_vector_only=by_vector, prepare=prepare)
