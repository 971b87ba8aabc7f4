"""The error of a server that does not start."""

from deployments.errors import TalkrayError


class StartError(TalkrayError):
    """The application did not come up; the message says what failed and what to do."""
