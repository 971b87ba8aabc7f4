"""The settings `api.voices`."""

from deployments.config import Strict
from serve_app.config import Positive


class VoiceSettings(Strict):
    """Voices that clients store."""

    # A folder or a bucket: /srv/voices, s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH. None: a folder of this
    # user's data (TALKRAY_DATA) on a single node, and no store on several nodes, which share no folder.
    store: str | None = None
    max_voices: Positive = 1000  # of each owner, with consent recordings
    max_bytes: Positive = 1 << 30  # of each owner's recordings, as FLAC
    require_consent: bool = False  # a voice is stored with a consent recording or a statement, or not at all
