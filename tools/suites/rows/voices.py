"""Stored voices and consents."""

from tools.suites.row import Owned, Rows

OWNED = {
    "voice_id": Owned("/v1/audio/voices", {"name": "mine"}, files=("audio_sample",)),
    "consent_id": Owned("/v1/audio/voice_consents", {"name": "c", "language": "en"}, files=("recording",)),
}
STORING = [
    f"/v1/audio/{place}" for place in ("voices", "voices/{voice_id}", "voice_consents", "voice_consents/{consent_id}")
]
ROWS = Rows(owned=OWNED, storing=STORING)
