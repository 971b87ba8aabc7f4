"""Ignored request fields and the reasons for ignoring them, as reported to clients."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from deployments.protocol import DRAWING_OPTIONS, SUBTALKER, ModelInfo, ModelKind
from serve_app.api.headers import IGNORED_HEADER
from serve_app.api.parsing.field_names import Names
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.voice_source import ChosenVoice
from serve_app.text.languages import DETECT, has_region, looks_foreign
from serve_app.text.spoken import SpokenText

Reasons = dict[str, str]  # reasons by field name
NO_CLONING = "the loaded model does not clone voices"
_MOST_NAMED = 8
_LONGEST_NAME = 40
_CONTROL = re.compile(r"[^ -~]")
_FOR_CLONING = ("ref_text", "x_vector_only_mode")


@dataclass(frozen=True, slots=True)
class Ignored:
    """One request's fields, and why some of them have no effect."""

    sent: Mapping[str, object]  # fields under the dialect's `names`
    names: Names
    reasons: Mapping[str, str]  # by the dialect's or Talkray's name of a field

    def by_client_name(self, reasons: Mapping[str, str], further: Names) -> Reasons:
        """Return all ignored fields and the reasons, by the dialect's field names.

        These are fields with one of the `reasons`, and unknown fields. `further`: other known fields.
        """
        sent, names = self.sent, {**self.names, **further}
        client_names = {ours: name for name, ours in reversed(names.items()) if ours is not None and name in sent}
        spelled = {client_names.get(name, name): reason for name, reason in reasons.items()}
        first = {name: client_names[ours] for name, ours in names.items() if ours is not None and name in sent}
        spelled |= {name: f"{other} was sent too" for name, other in first.items() if other != name}
        return with_unknown(sent, names, spelled)


def with_unknown(sent: Iterable[str], names: Iterable[str], reasons: Mapping[str, str]) -> Reasons:
    """Return `reasons` plus an entry for each field of `sent` that is not in `names`.

    Only the first _MOST_NAMED fields are listed by name, sanitized for headers and logs. The rest are only counted,
    because a body may have a million fields.
    """
    first = {_plain(name): reason for name, reason in list(reasons.items())[:_MOST_NAMED]}
    room = _MOST_NAMED - len(first)
    unknown = [name for name in sent if name not in names and name not in reasons]
    if unknown:
        known = {name.rpartition(".")[2]: name for name in names}  # `voice_settings.style` does not resemble `.speed`
        first |= {_plain(name): _unknown_reason(name, known) for name in unknown[:room]}
    more = max(len(reasons) - _MOST_NAMED, 0) + max(len(unknown) - room, 0)
    return first | ({"others": f"{more} more"} if more else {})


def without_effect(
    body: SpeechBody, info: ModelInfo, *, voice: ChosenVoice, instructions: str | None
) -> Iterator[tuple[str, str]]:
    """Yield fields that have no effect with this model and voice, or alongside other fields, and why. A later reason
    for the same field takes precedence. `instructions`: see `SpeechRequest`.
    """
    sent, stored = body.model_fields_set, voice.stored
    if info.kind is not ModelKind.CUSTOM_VOICE and voice.name is not None and stored is None:
        yield "voice", "the loaded model has no named voices"
    is_followed = info.supports_instructions or (stored is not None and stored.has_style(instructions))
    if instructions and not is_followed:
        yield "instructions", "the loaded model does not follow instructions"
    if info.kind is not ModelKind.BASE:
        yield from ((name, NO_CLONING) for name in _FOR_CLONING if name in sent)
    elif body.ref_text is not None and info.clones_by_vector:
        yield "ref_text", "the loaded model uses only the speaker embedding of a recording"
    elif body.ref_text is not None and body.x_vector_only_mode:
        yield "ref_text", "x_vector_only_mode is true"
    for switch, prefix in (("do_sample", ""), ("subtalker_dosample", SUBTALKER)):
        if getattr(body, switch) is False:
            options = (prefix + option for option in DRAWING_OPTIONS)
            yield from ((name, f"{switch} is false") for name in options if name in sent)
    if (reason := _language_reason(body, info, voice.language)) is not None:
        yield "language", reason
    if stored is not None and body.ref_text is not None:
        yield "ref_text", "the stored voice has its own transcript"


def _language_reason(body: SpeechBody, info: ModelInfo, language: str | None) -> str | None:
    """Return why the field `language` has less effect than a client may expect, or None."""
    if not body.any_language and (foreign := looks_foreign(body.input, info.languages)):
        return f"the text looks {foreign}, but the loaded voice speaks {', '.join(info.languages)}"
    if language == DETECT and not body.input:
        return "streamed text is spoken as auto, without detection"
    if language is None:
        return f"not supported by the loaded voice, which speaks {', '.join(info.languages)}: used auto"
    return f"spoken as {language}: regions and scripts are ignored" if has_region(body.language) else None


def as_header(reasons: Reasons) -> dict[str, str]:
    """Return the response header for ignored fields, or {} if there are none. Reasons may contain non-ASCII text."""
    text = "; ".join(f"{name} ({reason})" for name, reason in reasons.items())
    return {IGNORED_HEADER: _CONTROL.sub("?", text)} if reasons else {}


def entries(reasons: Reasons) -> list[dict[str, str]]:
    return [{"field": name, "reason": reason} for name, reason in reasons.items()]


def in_message(reasons: Reasons) -> dict[str, object]:
    """Return the message field for ignored fields, or {} if there are none."""
    return {"ignored": entries(reasons)} if reasons else {}


def _unknown_reason(name: str, known: Mapping[str, str]) -> str:
    close = get_close_matches(name[:_LONGEST_NAME].rpartition(".")[2].lower(), known, n=1, cutoff=0.75)
    return f"unknown field, did you mean {known[close[0]]}?" if close else "not supported"


def of_text(spoken: SpokenText) -> Reasons:
    """Return the kinds of text that are not read aloud, as the reason for `input`."""
    return {"input": left_out(spoken.left_out)} if spoken.left_out else {}


def left_out(kinds: Counter[str]) -> str:
    """Describe the kinds of text that are not read aloud, with counts, made safe for a header."""
    named = [f"{_CONTROL.sub('?', kind)} {count}" for kind, count in list(kinds.items())[:_MOST_NAMED]]
    more = len(kinds) - len(named)
    return f"not read aloud: {', '.join(named)}" + (f" and {more} more" if more > 0 else "")


def _plain(name: str) -> str:
    """Make `name` safe for a header and a log."""
    return re.sub(r"[^A-Za-z0-9_.:-]", "?", name[:_LONGEST_NAME])
