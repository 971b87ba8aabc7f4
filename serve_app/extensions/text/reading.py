"""Convert a request's text, using the request's and the server's markup, lexicon and normalization rules.

`POST /v1/audio/text` shows the resulting spoken text.
"""

import asyncio
import re
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.config import Strict
from deployments.embedded_voice.english import unspoken
from deployments.errors import InvalidRequest
from deployments.protocol import ModelInfo, SynthesisRequest
from serve_app.api.openai_docs import request_docs
from serve_app.api.parsing.client_input import read_object
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.resolve import ignored_fields
from serve_app.api.resolve.resolver import RequestHooks, Resolver
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.api.speech_service import SpeechService
from serve_app.api.voice_source import ClonedVoice, VoiceSource
from serve_app.extension import Dialect, Route
from serve_app.extensions.text.lexicon import Lexicon, LexiconSource
from serve_app.extensions.text.markup import Markup
from serve_app.extensions.text.normalisation import prepare
from serve_app.extensions.text.spoken_text import TextRules, read, rules_of
from serve_app.extensions.text.style_tags import StyleRules, as_instructions
from serve_app.speech.segments import Segments, Utterance
from serve_app.text.languages import DETECT, detected, language_name
from serve_app.text.spoken import LEFT_OUT, SpokenText, TextSpan

_LEAST_CHARS = 50  # of a limit for segments
_LONG_CHARS = 1 << 14  # converting longer texts would block the event loop for 10 ms or more


class TextSettings(Strict):
    """Defaults for requests that omit these fields (docs/text.md)."""

    markup: Markup = "auto"  # default of `markup` in requests
    paragraph_pause_s: Annotated[float, Field(ge=0, le=10)] = 0.6  # silence between paragraphs; 0 adds none
    max_segment_chars: Annotated[int, Field(ge=_LEAST_CHARS)] | None = None  # default: limit of the model


class TextFields(BaseModel):
    """Body fields of this extension."""

    markup: Markup | None = None  # None: use the server's setting
    text_normalization: Literal["on", "off"] | None = None  # on: write numbers and symbols as words
    lexicon: dict[str, str] | None = None  # pronunciations by word
    max_segment_chars: Annotated[int, Field(ge=_LEAST_CHARS)] | None = None  # None: use the server's setting


class TextHooks(RequestHooks):
    """Converts the texts of all requests."""

    body_fields = TextFields

    async def read_text(
        self, resolver: Resolver, body: SpeechBody, info: ModelInfo, stored: ClonedVoice | None
    ) -> tuple[SpokenText, ignored_fields.Reasons]:
        """Apply the rules of the request, its voice and the server. Raises InvalidRequest for invalid SSML, an invalid
        lexicon, or normalization of a text in an unknown language.
        """
        settings, source = resolver.settings.of(TextSettings), resolver.provider(LexiconSource) or LexiconSource()
        own, reasons = body.of(TextFields), ignored_fields.Reasons()
        chars = own.max_segment_chars
        if chars is not None and chars > info.max_segment_chars:
            reasons["max_segment_chars"] = f"the limit of the model is {info.max_segment_chars}"
        lexicon = Lexicon.checked(own.lexicon or {}, "lexicon")
        if stored is not None:
            lexicon = lexicon.over(Lexicon(stored.lexicon))
        if info.spoken_form is not None and own.text_normalization == "off":
            reasons["text_normalization"] = "the loaded voice always normalizes text"
        wants_words = info.spoken_form is None and own.text_normalization == "on"
        language = await _language_of_figures(body, info, stored) if wants_words else None
        if wants_words and language is None:
            reasons["text_normalization"] = "the language of the text is uncertain: set language"
        for_all = await source.lexicon_for_all()
        styles = StyleRules.of(body, info, stored)
        if body.instructions and styles.follows == "manners" and styles.effect(body.instructions) is None:
            reasons["instructions"] = "the loaded voice can only speak slower, faster or more quietly"
        rules = TextRules(
            own.markup or settings.markup,
            settings.paragraph_pause_s,
            lexicon=lexicon.over(for_all),
            spoken_form=info.spoken_form,
            max_segment_chars=chars or settings.max_segment_chars,
            normalised=language,
            styles=styles,
        )
        is_long = rules.normalised is not None or len(body.input) > _LONG_CHARS
        spoken = await asyncio.to_thread(read, body.input, rules) if is_long else read(body.input, rules)
        return spoken, reasons | ignored_fields.of_text(spoken)

    async def resolve(self, resolver: Resolver, speech: SpeechRequest, utterance: Utterance) -> Utterance:
        """Set the utterance's limit for segments, and the fields that the styles in its text change. Raises the errors
        of `in_style`.
        """
        named = {span.style for span in utterance.spans if span.style and not speech.is_tagged}
        styles = {style: await in_style(resolver.voices, speech, style, base=utterance.synthesis) for style in named}
        most = rules_of(speech.spoken, speech.info).max_segment_chars
        return replace(utterance, max_segment_chars=most, styles=styles)


async def in_style(
    voices: VoiceSource, speech: SpeechRequest, style: str, *, base: SynthesisRequest
) -> dict[str, object]:
    """Return the fields of `base` that a style changes. Raises the errors of `VoiceSource.reference`."""
    if (stored := speech.voice.stored) is None:
        return {"instructions": as_instructions(base.instructions, style)}
    by_vector = speech.body.x_vector_only_mode or speech.info.clones_by_vector
    return {"reference": await voices.reference(stored, style, speech.info, x_vector_only=by_vector)}


async def _language_of_figures(body: SpeechBody, info: ModelInfo, stored: ClonedVoice | None) -> str | None:
    """Return the language for text normalization, or None if it is uncertain and the request accepts any language.

    Raises InvalidRequest if the language is uncertain and the request must set `language`.
    """
    named = body.language
    if stored is not None and stored.language and "language" not in body.model_fields_set:
        named = stored.language
    language: str | None = language_name(named)
    if language in ("auto", DETECT):
        known = info.languages
        language = known[0] if len(known) == 1 else await asyncio.to_thread(detected, body.input, known)
    if language is not None:
        await asyncio.to_thread(prepare, language)
    elif not body.any_language:
        message = "text_normalization: the language of the text is uncertain. Set language."
        raise InvalidRequest(message, "text_normalization")
    return language


async def show_text(service: SpeechService, request: Request) -> Response:
    """Return the spoken text, the unspoken text and the segments for a body of `/v1/audio/speech`."""
    fields = await read_object(request)
    speech = await service.resolver.strict_request(fields)
    spoken = speech.spoken
    answer = {
        "object": "audio.text",
        "model": speech.info.name,
        "markup": rules_of(spoken, speech.info).markup,
        "sent": spoken.sent,
        "spoken": spoken.text,
        "left_out": [{"what": kind, "count": count} for kind, count in spoken.left_out.items()],
        "segments": [
            {"text": part.text, "pause_s": part.pause_s, "speed": part.speed}
            | ({"style": part.style} if part.style else {})
            for part in _segments_of(speech)
        ],
        "changed": [
            {"written": piece.written.replace(LEFT_OUT, "").strip(), "spoken": piece.spoken.strip()}
            for piece in spoken.pieces()
            if piece.spoken.strip() and piece.spoken.split() != piece.written.replace(LEFT_OUT, "").split()
        ],
        "unspoken": _unspoken(spoken, speech.info),
        "ignored": ignored_fields.entries(speech.ignored),
    }
    return JSONResponse(answer, headers=ignored_fields.as_header(speech.ignored))


def _segments_of(speech: SpeechRequest) -> list[TextSpan]:
    """Return the segments of the text, each with its preceding silence."""
    most = rules_of(speech.spoken, speech.info).max_segment_chars
    whole = SynthesisRequest("", speech.spoken.text)
    utterance = Utterance(whole, spans=speech.spoken.spans, max_segment_chars=most)
    return Segments.of(utterance, speech.info.max_segment_chars).plan()


def _unspoken(spoken: SpokenText, info: ModelInfo) -> list[tuple[int, int]]:
    """Return the start and end of each unspoken run, in code points of `sent`."""

    def mark(run: re.Match[str]) -> str:
        word = run[0]
        return LEFT_OUT * len(word) if unspoken(word) == len(word) else word

    pieces = spoken.pieces()
    sent = "".join(each.written if each.spoken.strip() else re.sub(r"\S", LEFT_OUT, each.written) for each in pieces)
    marked = sent if info.spoken_form is None else re.sub(r"[^\W\d_]+", mark, sent)
    return [run.span() for run in re.finditer(f"{LEFT_OUT}+", marked)]


DIALECT = Dialect(
    "OpenAI",
    routes=(Route("POST /v1/audio/text", show_text, "Show the spoken form of a text", docs=request_docs),),
    heading="Speech",
)
