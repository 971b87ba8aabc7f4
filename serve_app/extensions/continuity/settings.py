"""The settings `api.continuity`."""

from deployments.config import Strict


class ContinuitySettings(Strict):
    """What goes on from what was spoken before."""

    joints: bool = False  # each segment of a long text goes on from the end of the one before (docs/text.md#joints)
