"""Selection of a request's language, and errors for text in a language that the voice cannot speak."""

from deployments.errors import InvalidRequest
from deployments.protocol import ModelInfo
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.text.languages import (
    AUTO,
    DETECT,
    foreign_language,
    has_region,
    language_name,
    looks_foreign,
)


def spoken_language(body: SpeechBody, info: ModelInfo, speaker: str | None) -> str:
    """Return one of the model's languages, AUTO or DETECT. Raises InvalidRequest for other languages, unless
    `any_language` is set.
    """
    if (language := language_name(body.language)) in (AUTO, DETECT, *info.languages):
        return language
    if not body.any_language:
        raise _not_spoken("language", f"{body.language[:80]!r} is not supported", info, speaker)
    return AUTO


def language_reason(body: SpeechBody, info: ModelInfo) -> str | None:
    """Return why `language` has less effect than a client may expect, or None."""
    if not body.any_language and (foreign := looks_foreign(body.input, info.languages)):
        return f"the text looks {foreign}, but the loaded voice speaks {', '.join(info.languages)}"
    if (language := language_name(body.language)) == DETECT and not body.input:
        return "streamed text is spoken as auto, without detection"
    if language not in (AUTO, DETECT, *info.languages):
        return f"not supported by the loaded voice, which speaks {', '.join(info.languages)}: used auto"
    return f"spoken as {language}: regions and scripts are ignored" if has_region(body.language) else None


def check_language(text: str, body: SpeechBody, info: ModelInfo, speaker: str | None) -> None:
    """Raise InvalidRequest if `text` is clearly in a language that the voice cannot speak."""
    if not body.any_language and language_name(body.language) in (AUTO, DETECT):
        foreign = foreign_language(text, info.languages)
        if foreign is not None:
            raise _not_spoken("input", f"the text is written in {foreign}", info, speaker)


def unspoken_script(text: str, info: ModelInfo, speaker: str | None) -> InvalidRequest | None:
    """Return the error if the model cannot speak the text's script, or None if the script is not the cause."""
    if (script := foreign_language(text, info.languages)) is None:
        return None
    message = f"input is written in {script}, so none of it can be spoken; {speaks(info, speaker)}."
    return InvalidRequest(message, "input", "unsupported_language")


def speaks(info: ModelInfo, speaker: str | None) -> str:
    """Describe the languages of the model's speaker, or of the model, for error messages."""
    speaker_name = info.name if speaker is None else f"the voice {speaker!r} of {info.name}"
    return f"{speaker_name} speaks {', '.join(info.languages)}"


def _not_spoken(param: str, reason: str, info: ModelInfo, speaker: str | None) -> InvalidRequest:
    remedy = 'Set "any_language" to true to try it anyway'
    return InvalidRequest(f"{param}: {reason}; {speaks(info, speaker)}. {remedy}.", param, "unsupported_language")
