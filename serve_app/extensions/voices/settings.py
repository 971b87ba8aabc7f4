"""The settings `api.voices`."""

from deployments.config import Strict
from serve_app.config import Positive


class VoiceSettings(Strict):
    """Stored voices (docs/voices.md)."""

    # A folder or a bucket: `/srv/voices`, `s3://BUCKET/PATH`, `gs://BUCKET/PATH` or `az://CONTAINER/PATH`. Unset is a
    # folder in the user's data (`TALKRAY_DATA`) on one node. On several nodes, voices then cannot be stored.
    store: str | None = None
    max_voices: Positive = 1000  # maximum number of voices and consent recordings of one owner
    max_bytes: Positive = 1 << 30  # storage of one owner. Recordings are stored as FLAC
    require_consent: bool = False  # refuses voices without a consent recording or a statement
