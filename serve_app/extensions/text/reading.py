"""What is spoken of a request's text: markup, lexicons and figures, as the request and the settings say."""

import asyncio

from deployments.errors import InvalidRequest
from deployments.protocol import ModelInfo
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.resolve import ignored_fields
from serve_app.api.resolve.offer import Offer
from serve_app.api.voice_source import KeptVoice
from serve_app.extension import Opened
from serve_app.extensions.text.lexicon import Lexicon
from serve_app.extensions.text.normalisation import prepare
from serve_app.extensions.text.settings import TextSettings
from serve_app.extensions.text.spoken_text import TextRules, read
from serve_app.text.languages import DETECT, detected, language_name
from serve_app.text.spoken import SpokenText

_LONG_CHARS = 1 << 14  # only a job's: to read them takes the event loop 10 ms and more


class TextReading(Opened):
    """Reads the texts of all requests."""

    def join(self, offer: Offer) -> None:
        offer.read_text = read_text
        offer.fields |= {"markup", "text_normalization", "lexicon", "max_segment_chars"}


async def read_text(
    offer: Offer, body: SpeechBody, info: ModelInfo, stored: KeptVoice | None
) -> tuple[SpokenText, ignored_fields.Reasons]:
    """The spoken text of `body.input`; and the reasons why the rest of it, and some fields about it, have no effect.
    Raises InvalidRequest for bad SSML, for a bad lexicon, and for figures in an uncertain language.
    """
    settings = offer.settings.of(TextSettings)
    chars = body.max_segment_chars
    reasons: ignored_fields.Reasons = {}
    if chars is not None and chars > info.max_segment_chars:
        reasons["max_segment_chars"] = f"the model takes up to {info.max_segment_chars}"
    lexicon = Lexicon.checked(body.lexicon or {}, "lexicon")
    if stored is not None:
        lexicon = lexicon.over(Lexicon(stored.lexicon))
    if info.spoken_form is not None and body.text_normalization == "off":
        reasons["text_normalization"] = "the loaded voice speaks nothing but words"
    wants_words = info.spoken_form is None and body.text_normalization == "on"
    language = await _language_of_figures(body, info, stored) if wants_words else None
    if wants_words and language is None:
        reasons["text_normalization"] = "the language of the text is not certain: name it"
    for_all = Lexicon.EMPTY if offer.lexicon_for_all is None else await offer.lexicon_for_all()
    rules = TextRules(
        body.markup or settings.markup,
        settings.paragraph_pause_s,
        lexicon=lexicon.over(for_all),
        spoken_form=info.spoken_form,
        max_segment_chars=chars or settings.max_segment_chars,
        normalised=language,
    )
    is_long = rules.normalised is not None or len(body.input) > _LONG_CHARS
    spoken = await asyncio.to_thread(read, body.input, rules) if is_long else read(body.input, rules)
    return spoken, reasons | ignored_fields.of_text(spoken)


async def _language_of_figures(body: SpeechBody, info: ModelInfo, stored: KeptVoice | None) -> str | None:
    """The language whose words figures become; None if it is not certain and any language may be tried. Raises
    InvalidRequest where it has to be named.
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
        message = "text_normalization: the language of the text is not certain: name it in language."
        raise InvalidRequest(message, "text_normalization")
    return language
