"""Caller of a request, because voices, jobs and lexicons are visible only to their owners."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Visitor:
    """Caller that may access either its own voices or all voices.

    `name` is the name of its API key: None without a key, and "" if the server requires no keys.
    """

    name: str | None
    sees_all: bool = False


STRANGER = Visitor(None)
EVERYBODY = Visitor("", sees_all=True)
# Caller of the current task's request, set by access control, jobs and the command line. A context variable cannot be
# forgotten, whereas an argument would have to be passed through all dialects, and omitting it could expose a voice to a
# stranger. A task that does not set it sees no voices.
VISITOR: ContextVar[Visitor] = ContextVar("visitor", default=STRANGER)
