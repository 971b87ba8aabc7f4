"""Utterances from a `SpeechRequest`. They are built when the speech begins, because a WebSocket speaks many texts with
one request.
"""

import asyncio
from dataclasses import fields
from pkgutil import resolve_name
from typing import ClassVar

from deployments.errors import InvalidRequest, TalkrayError
from deployments.protocol import ModelKind, Reference, Sampling, SynthesisRequest
from serve_app.api.error_replies import ErrorKind, ExtensionError
from serve_app.api.parsing.field_names import in_client_names
from serve_app.api.parsing.speech_body import PASSED_ON, check_length
from serve_app.api.resolve.resolver import Resolver
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.api.resolve.voice import NO_CLONES, check_language, not_spoken, speaks, unspoken_script
from serve_app.audio.clone_prompts import PREPARE_REFERENCE
from serve_app.config import ApiSettings
from serve_app.speech.segments import Utterance, draw_seed
from serve_app.text.characters import clean
from serve_app.text.languages import AUTO, DETECT, detected
from serve_app.text.spoken import UNSPOKEN

# Limit on how much text may grow when numbers and symbols are written as words. Prose with many numbers grows by less
# than half, while digits alone grow fivefold.
_MOST_GROWTH = 2
_OPTIONS = [option.name for option in fields(Sampling)]


class StepFailed(ExtensionError):
    """A step of an extension failed. The message names the extension."""

    kind: ClassVar = ErrorKind(500, "server_error", "extension_failed")


async def build_utterance(
    resolver: Resolver, speech: SpeechRequest, *, request_id: str, client: str, live: bool = False
) -> Utterance:
    """Build one utterance for the request's model and run the steps of all extensions.

    Set `live` for a request whose text arrives later. Any other request may contain no speakable text, such as "...":
    see `is_speakable`. Raises InvalidRequest naming the field, StepFailed, and TalkrayError from a step.
    """
    try:
        utterance = await _utterance(resolver, speech, request_id, client, live=live)
        for name, hooks in resolver.hooks:
            try:
                utterance = await hooks.resolve(resolver, speech, utterance)
            except TalkrayError:
                raise
            except Exception as error:
                raise StepFailed(f"The extension {name} failed during this request.") from error
    except InvalidRequest as error:
        raise in_client_names(error, speech.fields) from None
    return utterance


async def _utterance(
    resolver: Resolver, speech: SpeechRequest, request_id: str, client: str, *, live: bool
) -> Utterance:
    body, info, spoken, language = speech.body, speech.info, speech.spoken, speech.voice.language
    options = {} if speech.voice.stored is None else dict(speech.voice.stored.sampling)  # the voice's defaults
    options |= {name: value for name in _OPTIONS if (value := getattr(body, name)) is not None}
    speaker = speech.voice.name if info.kind is ModelKind.CUSTOM_VOICE else None
    if body.ref_audio is not None and info.kind is not ModelKind.BASE:
        # Check this before checking for a missing `voice`, because that error would be misleading.
        raise InvalidRequest(f"{NO_CLONES.format(info.name)}.", "ref_audio")
    if language is None and not body.any_language:
        raise not_spoken("language", f"{body.language[:80]!r} is not supported", info, speaker)
    text = "" if live else _text(speech, resolver.settings, speaker=speaker)
    if by_segment := language == DETECT and not live:
        language = await asyncio.to_thread(detected, spoken.text, info.languages)
    synthesis = SynthesisRequest(
        request_id=request_id,
        client=client,
        voice=speaker,
        text=text,
        language=AUTO if language in (None, DETECT) else language,
        # Like the official package, ignore instructions that the checkpoint cannot follow.
        instructions=_instructions(speech, resolver.settings) if info.supports_instructions else None,
        reference=await _reference(resolver, speech) if info.kind is ModelKind.BASE else None,
        sampling=Sampling(**options),
        seed=draw_seed() if body.seed is None else body.seed,
        word_times=speech.word_times,
        model=info.route,
        **{name: getattr(body, name) for name in PASSED_ON},
    )
    return Utterance(
        synthesis,
        spans=() if live else spoken.spans,
        languages=info.languages if by_segment else (),
        may_redraw=body.seed is None and not body.ignore_eos,
    )


def _missing(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is required: {reason}.", param, "missing_required_parameter")


def _cleaned(param: str, text: str | None, settings: ApiSettings) -> str | None:
    """Clean a text. Return None if the text is missing or has nothing to speak."""
    if not text:
        return None
    check_length(param, text, settings)
    return clean(text) or None


def _text(speech: SpeechRequest, settings: ApiSettings, *, speaker: str | None) -> str:
    """Return the text for the model. It may have no speakable content. Raises InvalidRequest."""
    body, info, spoken, text = speech.body, speech.info, speech.spoken, speech.spoken.text
    is_unspoken = not text and spoken.has_words
    if is_unspoken and (error := unspoken_script(spoken.sent, info, speaker)) is not None:
        raise error
    if speech.voice.language in (AUTO, DETECT) and not body.any_language:
        check_language(body.input, info, speaker)
    if not text:
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
    instructions = _cleaned("instructions", speech.instructions, settings)
    if speech.info.kind is ModelKind.VOICE_DESIGN and instructions is None:
        raise _missing("instructions", "the loaded model creates the voice from instructions")
    return instructions


async def _reference(resolver: Resolver, speech: SpeechRequest) -> Reference:
    body, info, stored = speech.body, speech.info, speech.voice.stored
    by_vector = body.x_vector_only_mode or info.clones_by_vector
    if stored is not None:
        return await resolver.voices.reference(stored, speech.instructions, info, x_vector_only=by_vector)
    if body.ref_audio is None:
        named = f"no voice {speech.voice.name[:80]!r} is stored, and " if speech.voice.name else ""
        remedy = "Send ref_audio, or set voice to a stored voice"
        raise _missing("ref_audio", f"{named}the loaded model clones the voice of a recording. {remedy}")
    text = _cleaned("ref_text", body.ref_text, resolver.settings)
    if text is None and not by_vector:
        raise _missing("ref_text", "send the transcript of ref_audio, or set x_vector_only_mode to true")
    reference: Reference = await resolve_name(PREPARE_REFERENCE)(
        body.ref_audio, text, info, x_vector_only=by_vector, prepare=resolver.preparation(body)
    )
    return reference
