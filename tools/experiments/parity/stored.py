"""Stored voices of Talkray: the stored form of an upload, and the prompts derived from it."""

import asyncio
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from deployments.codec.encoder import CodecEncoder
from deployments.protocol import ClonePrompt, SynthesisRequest
from deployments.talker.engine.engine import Engine
from serve_app.api.access.callers import EVERYBODY, VISITOR
from serve_app.audio.recordings import PREPARATIONS
from serve_app.extensions.voices.library import Voices
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.extensions.voices.stored_voice import Details, SentRecording, StoredVoice
from serve_app.extensions.voices.voice_store import VoiceStore
from tools.experiments.parity.cases import SAMPLE_RATE, VOICE_TEXTS, reference_audio


@dataclass(frozen=True, slots=True)
class StoredVoices:
    """A store with one voice for each preparation and each way of cloning. `recordings` has the files to compare with:
    the stored files of prepared voices, and the uploaded files of the others.
    """

    store: VoiceStore
    library: Voices
    voices: dict[str, StoredVoice]  # by preparation and way of cloning
    recordings: Path

    def prompt(self, name: str, engine: Engine, encoder: CodecEncoder) -> ClonePrompt:
        """Build a voice's prompt as replicas do, and read it back from the store."""
        return asyncio.run(self._prompt(self.voices[name], engine, encoder))

    def samples(self, name: str) -> NDArray[np.float32]:
        """Return the [samples] of the stored recording."""
        voice = self.voices[name]
        audio: NDArray[np.float32] = soundfile.read(
            io.BytesIO(self.store.recording(voice, voice.takes[0])), dtype="float32"
        )[0]
        return audio

    async def _prompt(self, voice: StoredVoice, engine: Engine, encoder: CodecEncoder) -> ClonePrompt:
        VISITOR.set(EVERYBODY)
        reference = await self.library.reference(voice, voice.takes[0].style, engine.info, x_vector_only=False)
        codes = None if reference.x_vector_only else encoder.encode(reference.samples)
        request = SynthesisRequest("parity", "Hi.", reference=reference, reference_codes=codes)
        engine.prompts.build(request)
        made = engine.prompts.clone_prompt(request)
        assert made is not None
        self.store.keep_derived(voice, reference.key, made)
        kept = self.store.derived(voice, reference.key)
        assert kept is not None
        return kept


def upload() -> bytes:
    """Return a WAV file with silence to trim at both ends."""
    quiet, file = np.zeros(SAMPLE_RATE // 2, np.float32), io.BytesIO()
    audio = np.concatenate([quiet, reference_audio(3 * SAMPLE_RATE), quiet])
    soundfile.write(file, audio, SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


def store_voices(scratch: Path) -> StoredVoices:
    """Upload the recording with each preparation and way of cloning."""
    return asyncio.run(_store_voices(scratch))


async def _store_voices(scratch: Path) -> StoredVoices:
    VISITOR.set(EVERYBODY)
    store, sent, voices = VoiceStore(str(scratch / "store")), upload(), dict[str, StoredVoice]()
    library = Voices(store, VoiceSettings())
    recordings = scratch / "recordings"
    recordings.mkdir()
    for prepare in PREPARATIONS:
        for way, text in VOICE_TEXTS.items():
            name = f"{prepare} {way}"
            voices[name] = await library.add(Details(name), [SentRecording(sent, text, prepare=prepare)], field="file")
        [take] = voices[name].takes
        assert bool(take.changes) == (prepare == "auto"), take.changes
        kept = await library.recording(voices[name], take)
        file = recordings / (f"{prepare}.flac" if prepare == "auto" else f"{prepare}.wav")
        file.write_bytes(kept if prepare == "auto" else sent)
    return StoredVoices(store, library, voices, recordings)
