"""Ignored request fields and the reasons for ignoring them, as reported to clients."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from serve_app.api.headers import IGNORED_HEADER
from serve_app.api.parsing.field_names import Names
from serve_app.text.spoken import SpokenText

PREVIOUS = "previous_request_id"

Reasons = dict[str, str]  # reasons by field name
_MOST_NAMED = 8
_LONGEST_NAME = 40
_CONTROL = re.compile(r"[^ -~]")


@dataclass(frozen=True, slots=True)
class Ignored:
    """One request's fields, and why some of them have no effect."""

    sent: Mapping[str, object]  # fields under the dialect's `names`
    names: Names
    reasons: Reasons  # by the dialect's or Talkray's name of a field

    def reasons_for(self, without_effect: Reasons, further: Names) -> Reasons:
        """Return all ignored fields and the reasons, by the dialect's field names.

        These are fields with one of the `reasons`, fields `without_effect` on this speech, and unknown fields.
        `further`: known fields beyond the dialect's own.
        """
        sent, names = self.sent, {**self.names, **further}
        client_names = {ours: name for name, ours in reversed(names.items()) if ours is not None and name in sent}
        spelled = {client_names.get(name, name): reason for name, reason in (without_effect | self.reasons).items()}
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
