"""Fields of a request without effect, and the reason: clients learn them with the answer."""

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

Reasons = dict[str, str]  # reason by field
_MOST_NAMED = 8
_LONGEST_NAME = 40
_CONTROL = re.compile(r"[^ -~]")
_FOR_CLONING = ("ref_text", "x_vector_only_mode", "prepare")


class Ignored:
    """Collects which fields of one request have no effect, and why."""

    def __init__(self, sent: Mapping[str, object], names: Names, reasons: Mapping[str, str] | None = None) -> None:
        """`sent`: the fields, under the dialect's `names`. `reasons`: those that the dialect knows, by field."""
        self._sent, self._names, self._reasons = sent, names, dict(reasons or {})

    def note(self, field: str, why: str | None) -> None:
        """`field`: the dialect's name or ours. None: the field has its effect."""
        if why is not None:
            self._reasons[field] = why

    def note_all(self, reasons: Reasons) -> None:
        self._reasons |= reasons

    def reasons_for(
        self, body: SpeechBody, info: ModelInfo, *, further: Names, read: Collection[str], stored: KeptVoice | None
    ) -> Reasons:
        """Every ignored field by the dialect's name: noted fields, fields without effect on this model, unknown fields.

        `body` was made of the fields. `further`: fields beside the dialect's that are known. `read`: those of
        EXTENSION_FIELDS that an extension reads. `stored` is the voice that speaks.
        """
        sent, names = self._sent, {**self._names, **further}
        of_voice: Reasons = {}
        if stored is not None:
            has_style = stored.has_style(body.instructions)
            if body.ref_text is not None:
                of_voice["ref_text"] = "the stored voice has its own"
            if body.prepare is not None:
                of_voice["prepare"] = "it is for recordings that are sent"
            body = body.model_copy(update={"voice": None, **({"instructions": None} if has_style else {})})
        theirs = {ours: name for name, ours in reversed(names.items()) if ours is not None and name in sent}
        by_our_names = {**dict(_without_effect(body, info)), **_unread(body, read), **of_voice, **self._reasons}
        spelled = {theirs.get(name, name): reason for name, reason in by_our_names.items()}
        first = {name: theirs[ours] for name, ours in names.items() if ours is not None and name in sent}
        spelled |= {name: f"{other} is there too" for name, other in first.items() if other != name}
        return with_unknown(sent, names, spelled)


def with_unknown(sent: Iterable[str], names: Iterable[str], reasons: Mapping[str, str]) -> Reasons:
    """`reasons`, and an entry for each field of `sent` that is none of `names`.

    The first fields have their names, made safe for a header and a log. The rest is counted, which costs next
    to nothing: a body may have a million fields.
    """
    first = {_plain(name): reason for name, reason in list(reasons.items())[:_MOST_NAMED]}
    room = _MOST_NAMED - len(first)
    known = list(names)
    unknown = [name for name in sent if name not in names and name not in reasons]
    first |= {_plain(name): _unknown_reason(name, known) for name in unknown[:room]}
    more = max(len(reasons) - _MOST_NAMED, 0) + max(len(unknown) - room, 0)
    return first | ({"others": f"{more} more"} if more else {})


def always_streamed(fields: Mapping[str, object]) -> dict[str, str]:
    """Fields of a SpeechBody that have no effect on a WebSocket."""
    is_whole = str(fields.get("stream")).strip().lower() == "false"
    wants_whole = {"stream": is_whole, "stream_format": str(fields.get("stream_format")).strip().lower() == "sse"}
    reasons = {name: "a WebSocket sends audio as it comes" for name, is_asked in wants_whole.items() if is_asked}
    return reasons | ({PREVIOUS: "over HTTP and on our own WebSocket only"} if fields.get(PREVIOUS) is not None else {})


def as_header(reasons: Reasons) -> dict[str, str]:
    """The header of an HTTP response, none if nothing was ignored. A reason may name a stored voice, in any script."""
    text = "; ".join(f"{name} ({reason})" for name, reason in reasons.items())
    return {IGNORED_HEADER: _CONTROL.sub("?", text)} if reasons else {}


def entries(reasons: Reasons) -> list[dict[str, str]]:
    return [{"field": name, "reason": reason} for name, reason in reasons.items()]


def in_message(reasons: Reasons) -> dict[str, object]:
    """The field that is added to a message, none if nothing was ignored."""
    return {"ignored": entries(reasons)} if reasons else {}


def _unknown_reason(name: str, known: list[str]) -> str:
    close = get_close_matches(name[:_LONGEST_NAME].lower(), known, n=1, cutoff=0.75)
    return f"unknown field, did you mean {close[0]}?" if close else "unknown field"


def _without_effect(body: SpeechBody, info: ModelInfo) -> Iterator[tuple[str, str]]:
    """Fields that are known, but not to this model or beside others."""
    sent = body.model_fields_set
    if info.kind is not ModelKind.CUSTOM_VOICE and body.voice is not None:
        yield "voice", "the loaded model has no named voices"
    if body.instructions and not info.supports_instructions:
        yield "instructions", "the loaded voice follows none"
    if info.kind is not ModelKind.BASE:
        yield from ((name, "the loaded model does not clone voices") for name in _FOR_CLONING if name in sent)
    elif body.ref_text is not None and info.clones_by_vector:
        yield "ref_text", "the loaded model takes only the speaker's sound from a recording"
    elif body.ref_text is not None and body.x_vector_only_mode:
        yield "ref_text", "x_vector_only_mode is true"
    for switch, prefix in (("do_sample", ""), ("subtalker_dosample", SUBTALKER)):
        if getattr(body, switch) is False:
            options = (prefix + option for option in DRAWING_OPTIONS)
            yield from ((name, f"{switch} is false") for name in options if name in sent)
    if (reason := language_reason(body, info)) is not None:
        yield "language", reason


def _unread(body: SpeechBody, read: Collection[str]) -> Reasons:
    """Fields of extensions that are not here."""
    sent = (name for name in EXTENSION_FIELDS if name in body.model_fields_set and getattr(body, name))
    return {name: "no extension here reads it" for name in sent if name not in read}


def of_text(spoken: SpokenText) -> Reasons:
    """The parts of the text that are not read aloud, as the reason of `input`."""
    return {"input": left_out(spoken.left_out)} if spoken.left_out else {}


def left_out(kinds: Counter[str]) -> str:
    """The kinds of text that are not read aloud, with their counts, made safe for a header."""
    named = [f"{_CONTROL.sub('?', kind)} {count}" for kind, count in list(kinds.items())[:_MOST_NAMED]]
    more = len(kinds) - len(named)
    return f"not read aloud: {', '.join(named)}" + (f" and {more} more" if more > 0 else "")


def _plain(name: str) -> str:
    """`name`, made safe for a header and a log."""
    return re.sub(r"[^A-Za-z0-9_.:-]", "?", name[:_LONGEST_NAME])
