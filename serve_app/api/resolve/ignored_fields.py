"""Ignored request fields and the reasons for ignoring them, as reported to clients."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches

from deployments.protocol import DRAWING_OPTIONS, SUBTALKER, ModelInfo, ModelKind
from serve_app.api.headers import IGNORED_HEADER
from serve_app.api.parsing.field_names import Names
from serve_app.api.parsing.speech_body import EXTENSION_FIELDS, SpeechBody
from serve_app.api.resolve.language import language_reason
from serve_app.api.voice_source import KeptVoice
from serve_app.text.spoken import SpokenText

PREVIOUS = "previous_request_id"

Reasons = dict[str, str]  # reasons by field name
_MOST_NAMED = 8
_LONGEST_NAME = 40
_CONTROL = re.compile(r"[^ -~]")
_FOR_CLONING = ("ref_text", "x_vector_only_mode", "prepare")


class Ignored:
    """Collects one request's ignored fields and the reason for each."""

    def __init__(self, sent: Mapping[str, object], names: Names, reasons: Mapping[str, str] | None = None) -> None:
        """Create the collector. `sent`: fields under the dialect's `names`. `reasons`: reasons already determined by
        the dialect.
        """
        self._sent, self._names, self._reasons = sent, names, dict(reasons or {})

    def note(self, field: str, why: str | None) -> None:
        """Record why `field` has no effect. `field` is the dialect's or Talkray's name. If `why` is None, the field
        does have an effect.
        """
        if why is not None:
            self._reasons[field] = why

    def note_all(self, reasons: Reasons) -> None:
        self._reasons |= reasons

    def reasons_for(
        self, body: SpeechBody, info: ModelInfo, *, further: Names, read: Collection[str], stored: KeptVoice | None
    ) -> Reasons:
        """Return all ignored fields and the reasons, by the dialect's field names.

        These are recorded fields, fields that have no effect on this model, and unknown fields. `body` was parsed from
        the fields. `further`: known fields beyond the dialect's own. `read`: fields of EXTENSION_FIELDS that an
        extension reads. `stored`: the stored voice of the request.
        """
        sent, names = self._sent, {**self._names, **further}
        of_voice: Reasons = {}
        if stored is not None:
            has_style = stored.has_style(body.instructions)
            if body.ref_text is not None:
                of_voice["ref_text"] = "the stored voice has its own transcript"
            if body.prepare is not None:
                of_voice["prepare"] = "only applies to recordings in the request"
            body = body.model_copy(update={"voice": None, **({"instructions": None} if has_style else {})})
        theirs = {ours: name for name, ours in reversed(names.items()) if ours is not None and name in sent}
        by_our_names = {**dict(_without_effect(body, info)), **_unread(body, read), **of_voice, **self._reasons}
        spelled = {theirs.get(name, name): reason for name, reason in by_our_names.items()}
        first = {name: theirs[ours] for name, ours in names.items() if ours is not None and name in sent}
        spelled |= {name: f"{other} was sent too" for name, other in first.items() if other != name}
        return with_unknown(sent, names, spelled)


def with_unknown(sent: Iterable[str], names: Iterable[str], reasons: Mapping[str, str]) -> Reasons:
    """Return `reasons` plus an entry for each field of `sent` that is not in `names`.

    Only the first _MOST_NAMED fields are listed by name, sanitized for headers and logs. The rest are only counted,
    because a body may have a million fields.
    """
    first = {_plain(name): reason for name, reason in list(reasons.items())[:_MOST_NAMED]}
    room = _MOST_NAMED - len(first)
    known = list(names)
    unknown = [name for name in sent if name not in names and name not in reasons]
    first |= {_plain(name): _unknown_reason(name, known) for name in unknown[:room]}
    more = max(len(reasons) - _MOST_NAMED, 0) + max(len(unknown) - room, 0)
    return first | ({"others": f"{more} more"} if more else {})


def always_streamed(fields: Mapping[str, object]) -> dict[str, str]:
    """Return the SpeechBody fields of `fields` that have no effect on a WebSocket, and why."""
    is_whole = str(fields.get("stream")).strip().lower() == "false"
    wants_whole = {"stream": is_whole, "stream_format": str(fields.get("stream_format")).strip().lower() == "sse"}
    reasons = {name: "a WebSocket always streams audio" for name, is_asked in wants_whole.items() if is_asked}
    return reasons | ({PREVIOUS: "only for HTTP and Talkray's WebSocket"} if fields.get(PREVIOUS) is not None else {})


def as_header(reasons: Reasons) -> dict[str, str]:
    """Return the response header for ignored fields, or {} if there are none. Reasons may contain non-ASCII text."""
    text = "; ".join(f"{name} ({reason})" for name, reason in reasons.items())
    return {IGNORED_HEADER: _CONTROL.sub("?", text)} if reasons else {}


def entries(reasons: Reasons) -> list[dict[str, str]]:
    return [{"field": name, "reason": reason} for name, reason in reasons.items()]


def in_message(reasons: Reasons) -> dict[str, object]:
    """Return the message field for ignored fields, or {} if there are none."""
    return {"ignored": entries(reasons)} if reasons else {}


def _unknown_reason(name: str, known: list[str]) -> str:
    close = get_close_matches(name[:_LONGEST_NAME].lower(), known, n=1, cutoff=0.75)
    return f"unknown field, did you mean {close[0]}?" if close else "unknown field"


def _without_effect(body: SpeechBody, info: ModelInfo) -> Iterator[tuple[str, str]]:
    """Yield fields that have no effect with this model or alongside other fields, and why."""
    sent = body.model_fields_set
    if info.kind is not ModelKind.CUSTOM_VOICE and body.voice is not None:
        yield "voice", "the loaded model has no named voices"
    if body.instructions and not info.supports_instructions:
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
    if (reason := language_reason(body, info)) is not None:
        yield "language", reason


def _unread(body: SpeechBody, read: Collection[str]) -> Reasons:
    """Return the fields in the request that need an extension which is not loaded."""
    sent = (name for name in EXTENSION_FIELDS if name in body.model_fields_set and getattr(body, name))
    return {name: "no loaded extension reads this field" for name in sent if name not in read}


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
