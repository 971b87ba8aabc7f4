"""What the door refuses before anybody looks at the request; each message goes to the client as it is."""

from deployments.errors import TalkrayError


class Refusal(TalkrayError):
    """Base of the refusals."""


class Unauthorized(Refusal):
    """The request carries no API key, or one that is not valid (any more)."""


class Forbidden(Refusal):
    """The request comes from a web page, or to a host name, that is not allowed."""


class HeadersTooLarge(Refusal):
    """The header lines are over their byte limit."""


class BodyTooSlow(Refusal):
    """The body did not arrive in time."""
