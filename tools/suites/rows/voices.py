"""Stored voices and consents."""

from tools.suites.row import Owned, Rows

OWNED = {
    "voice_id": Owned("/v1/audio/voices", {"name": "mine"}, files=("audio_sample",)),
    "consent_id": Owned("/v1/audio/voice_consents", {"name": "c", "language": "en"}, files=("recording",)),
}
ROWS = Rows(owned=OWNED)
