"""In which language a request is spoken, and the errors of texts in languages that the voice does not speak."""

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
    """One of the model's languages, AUTO or DETECT. Raises InvalidRequest of another one, unless any may be tried."""
    if (language := language_name(body.language)) in (AUTO, DETECT, *info.languages):
        return language
    if not body.any_language:
        raise _not_spoken("language", f"{body.language[:80]!r} is none of the loaded voice's", info, speaker)
    return AUTO


def language_reason(body: SpeechBody, info: ModelInfo) -> str | None:
    """Why the field `language` has less effect than a client may think, or none."""
    if not body.any_language and (foreign := looks_foreign(body.input, info.languages)):
        return f"the text looks {foreign}, the loaded voice speaks {', '.join(info.languages)}: read so"
    if (language := language_name(body.language)) == DETECT and not body.input:
        return "a text that is still written is not looked at: spoken as auto"
    if language not in (AUTO, DETECT, *info.languages):
        return f"not of the loaded voice, which speaks {', '.join(info.languages)}: tried as auto"
    return f"spoken as {language}: regions and scripts are not told apart" if has_region(body.language) else None


def check_language(text: str, body: SpeechBody, info: ModelInfo, speaker: str | None) -> None:
    """Raise InvalidRequest if `text` is clearly in a language that the voice does not speak."""
    if not body.any_language and language_name(body.language) in (AUTO, DETECT):
        foreign = foreign_language(text, info.languages)
        if foreign is not None:
            raise _not_spoken("input", f"it is written in {foreign}", info, speaker)


def unspoken_script(text: str, info: ModelInfo, speaker: str | None) -> InvalidRequest | None:
    """The error of a text of which nothing is spoken because of its script; None if that is not the reason."""
    if (script := foreign_language(text, info.languages)) is None:
        return None
    message = f"input is written in {script}: none of it can be spoken; {speaks(info, speaker)}."
    return InvalidRequest(message, "input", "unsupported_language")


def speaks(info: ModelInfo, speaker: str | None) -> str:
    """Which languages the model's speaker, or the model, speaks: for errors."""
    speaker_name = info.name if speaker is None else f"the voice {speaker!r} of {info.name}"
    return f"{speaker_name} speaks {', '.join(info.languages)}"


def _not_spoken(param: str, reason: str, info: ModelInfo, speaker: str | None) -> InvalidRequest:
    remedy = '"any_language": true tries it anyway'
    return InvalidRequest(f"{param}: {reason}; {speaks(info, speaker)}. {remedy}.", param, "unsupported_language")
