"""The caller of a request, because voices, jobs and lexicons are shown to their owners only."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Visitor:
    """A caller, which may access only its own voices, or all.

    `name` is the name of its API key, None without a key, and "" if the server requires no keys.
    """

    name: str | None
    sees_all: bool = False


STRANGER = Visitor(None)
EVERYBODY = Visitor("", sees_all=True)
# The caller of the request that the current task answers. Access control, jobs and the command line set it. It is not
# an argument, because the functions of all dialects would have to pass it on, and one that forgot it would show a voice
# to a stranger. A task that does not set it sees no voices.
VISITOR: ContextVar[Visitor] = ContextVar("visitor", default=STRANGER)
