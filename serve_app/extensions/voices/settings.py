"""Settings below `api.voices`, and the body field of the extension."""

from pydantic import BaseModel

from deployments.config import Strict
from serve_app.audio.clone_prompts import Preparation
from serve_app.config import Positive


class VoiceSettings(Strict):
    """Settings of stored voices (docs/voices.md)."""

    # A folder or a bucket: `/srv/voices`, `s3://BUCKET/PATH`, `gs://BUCKET/PATH` or `az://CONTAINER/PATH`. By default,
    # one node uses a folder in the user's data (`TALKRAY_DATA`), and several nodes cannot store voices.
    store: str | None = None
    max_voices: Positive = 1000  # maximum number of voices and consent recordings per owner
    max_bytes: Positive = 1 << 30  # maximum storage per owner; the store keeps recordings as FLAC
    require_consent: bool = False  # reject voices without a consent recording or statement


class RecordingFields(BaseModel):
    """Body field of this extension."""

    prepare: Preparation | None = None  # preparation of ref_audio; None: "none"
