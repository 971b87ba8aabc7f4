"""Our own server, asked as clients of others ask it: each form is one that it takes, and audio comes of each."""

import pytest

from loadtest.arrivals import ScheduledRequest
from loadtest.clients import open_session, speak
from loadtest.dialects import DIALECTS
from loadtest.recording import Recording
from loadtest.settings import Settings
from loadtest.traces import Clock, PcmLayout
from tests.serve_app.extensions.test_interruptions import serving
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, utterance

pytestmark = pytest.mark.anyio
FRAMES = 10


async def test_our_own_server_speaks_in_every_form() -> None:
    synthesizer = FakeSynthesizer(CUSTOM_VOICE, utterance(FRAMES))
    async with serving(synthesizer) as url, open_session() as session:
        for number, name in enumerate(DIALECTS):
            text = f"Text number {number}."
            recording = Recording(ScheduledRequest(number, 0.0, text), Clock.started())
            recording.kept = bytearray()
            settings = Settings(url, dialect=name, options={"model": "tts-1", "voice": CUSTOM_VOICE.voices[0]})
            await speak(session, settings, recording=recording)
            trace = recording.finish()
            assert (name, trace.failure, trace.error) == (name, None, None)
            assert trace.layout == PcmLayout(24000)
            assert trace.audio_s == pytest.approx(FRAMES * 0.08, abs=0.03), name
            assert trace.num_bytes == len(recording.kept)
            assert synthesizer.requests[-1].voice == CUSTOM_VOICE.voices[0]
