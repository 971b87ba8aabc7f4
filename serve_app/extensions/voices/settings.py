"""Settings below `api.voices`, and the body field of the extension."""

from pydantic import BaseModel

from deployments.config import Strict
from deployments.protocol import ModelInfo, ModelKind
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.resolve.ignored_fields import NO_CLONING, Reasons
from serve_app.api.voice_source import ChosenVoice
from serve_app.audio.clone_prompts import Decode, Preparation
from serve_app.config import Positive
from serve_app.extensions.voices.reference_doctor import decode_prepared


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


def preparation(body: SpeechBody) -> Decode | None:
    """Implement `Resolver.preparation`."""
    return decode_prepared if body.of(RecordingFields).prepare == "auto" else None


def unused_preparation(body: SpeechBody, info: ModelInfo, voice: ChosenVoice) -> Reasons:
    """Implement `Resolver.unused`."""
    if body.of(RecordingFields).prepare is None or (info.kind is ModelKind.BASE and voice.stored is None):
        return {}
    return {"prepare": NO_CLONING if voice.stored is None else "only applies to recordings in the request"}
