"""What of a request has no effect, and why: clients learn it with the answer, so that no field goes in silence."""

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches

from pydantic import AliasChoices

from deployments.protocol import ModelInfo, ModelKind
from serve_app.languages import foreign_letters, language_name, looks_foreign
from serve_app.speech_request import SpeechBody

HEADER = "x-ignored"

NO_WORD_TIMES = "of the loaded model they are not known"

Ignored = dict[str, str]  # reason by field, both fit for a header

_MOST_NAMED = 8
_LONGEST_NAME = 40
_TAG = re.compile(r"</?([A-Za-z][A-Za-z:-]*)[^<>]*>")
_ALIASES = {
    name: [str(choice) for choice in alias.choices]
    if isinstance(alias := field.validation_alias, AliasChoices)
    else [name]
    for name, field in SpeechBody.model_fields.items()
}
_FIELDS = [name for names in _ALIASES.values() for name in names]
_FOR_CLONING = ("ref_text", "x_vector_only_mode")


def ignored(
    fields: Mapping[str, object], body: SpeechBody, info: ModelInfo, *, other: Mapping[str, str | None] | None = None
) -> Ignored:
    """Of `fields`, that `body` was made of. `other` are fields besides a body's: a reason, or None where one counts."""
    other = other or {}
    reasons = _unknown(fields, other) | dict(_doubled(fields)) | dict(_without_effect(body, info))
    reasons |= {name: reason for name, reason in other.items() if reason is not None and name in fields}
    return plain(reasons)


def plain(reasons: Mapping[str, str]) -> Ignored:
    """The first of them, under names that can stand in a header and in a log."""
    named = {_plain(name): reason for name, reason in list(reasons.items())[:_MOST_NAMED]}
    more = len(reasons) - len(named)
    return named | ({"others": f"{more} more"} if more else {})


def header(reasons: Ignored) -> dict[str, str]:
    """For an HTTP response: none where nothing was ignored."""
    return {HEADER: "; ".join(f"{name} ({reason})" for name, reason in reasons.items())} if reasons else {}


def entries(reasons: Ignored) -> list[dict[str, str]]:
    """For an event or a message."""
    return [{"field": name, "reason": reason} for name, reason in reasons.items()]


def _unknown(fields: Mapping[str, object], other: Iterable[str]) -> Ignored:
    known = [*_FIELDS, *other]
    return {name: _unknown_reason(name, known) for name in fields if name not in known}


def _unknown_reason(name: str, known: list[str]) -> str:
    close = get_close_matches(name[:_LONGEST_NAME].lower(), known, n=1, cutoff=0.75)
    return f"unknown field, did you mean {close[0]}?" if close else "unknown field"


def _doubled(fields: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for names in _ALIASES.values():
        first, *later = [name for name in names if name in fields] or [""]
        yield from ((name, f"{first} is there too") for name in later)


def _without_effect(body: SpeechBody, info: ModelInfo) -> Iterator[tuple[str, str]]:
    """Fields that are known, but not to this model or beside others."""
    sent = body.model_fields_set
    if info.kind is not ModelKind.CUSTOM_VOICE and body.voice is not None:
        yield "voice", "the loaded model has no named voices"
    if body.instructions and not info.supports_instructions:
        yield "instructions", "the loaded voice follows none"
    if info.kind is not ModelKind.BASE:
        yield from ((name, "the loaded model does not clone voices") for name in _FOR_CLONING if name in sent)
    elif body.x_vector_only_mode and body.ref_text is not None:
        yield "ref_text", "x_vector_only_mode is true"
    if body.word_timestamps and not info.word_times:
        yield "word_timestamps", NO_WORD_TIMES
    for switch, prefix in (("do_sample", ""), ("subtalker_dosample", "subtalker_")):
        if getattr(body, switch) is False:
            options = (f"{prefix}{option}" for option in ("temperature", "top_k", "top_p"))
            yield from ((name, f"{switch} is false") for name in options if name in sent)
    if language_name(body.language) not in ("auto", *info.languages):
        yield "language", f"not of the loaded voice, which speaks {', '.join(info.languages)}: tried as auto"
    if not body.any_language and (foreign := looks_foreign(body.input, info.languages)):
        yield "language", f"the text looks {foreign}, the loaded voice speaks {', '.join(info.languages)}: read so"
    if info.spoken_form is not None and (dropped := "; ".join(_dropped(body.input, info))):
        yield "input", dropped


def _dropped(text: str, info: ModelInfo) -> Iterator[str]:
    """What a spoken form leaves out of the text."""
    if tags := list(dict.fromkeys(_plain(tag.lower()) for tag in _TAG.findall(text))):
        yield f"markup is not spoken: {', '.join(tags[:_MOST_NAMED])}"
    if foreign := foreign_letters(text, info.languages):
        yield f"letters that the voice cannot speak: {foreign.total()}"


def _plain(name: str) -> str:
    """`name` as it can stand in a header and in a log."""
    return re.sub(r"[^A-Za-z0-9_.:-]", "?", name[:_LONGEST_NAME])
