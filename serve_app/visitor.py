"""The caller of a request: a voice, a job or a lexicon is shown to its owner only."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Visitor:
    """Whose voices a caller may see: its own, or all. `name` is the name of its API key, None without a key, and ""
    where no keys are asked for.
    """

    name: str | None
    sees_all: bool = False


STRANGER = Visitor(None)
EVERYBODY = Visitor("", sees_all=True)
# The caller of the request that the present task answers. Access control, jobs and the command line set it. It is no
# argument, because the functions of all dialects would have to pass it on, and one that forgot it would show a voice to
# a stranger. A task that sets nothing sees no voice.
VISITOR: ContextVar[Visitor] = ContextVar("visitor", default=STRANGER)
