"""Recordings, and ways to ask for stored voices as every client does."""

import io
from functools import cache
from pathlib import Path

import httpx
import numpy as np
import soundfile
from fastapi import FastAPI
from numpy.typing import NDArray

from deployments.protocol import ClonePrompt, Reference
from serve_app.audio import clone_prompts
from serve_app.audio.recordings import decode_file
from serve_app.cli.key_file import create_key
from serve_app.config import AccessSettings, ApiSettings
from serve_app.extension import forget_nothing
from serve_app.extensions.live.live_text import LiveTexts
from serve_app.extensions.voices.extension import open_voices
from serve_app.extensions.voices.library import Forget
from serve_app.extensions.voices.settings import VoiceSettings
from tests.serve_app.fake import BASE, FakeSynthesizer, utterance
from tests.serve_app.one_model import client_of, one_api

RATE = 24_000


def hiss(seed: int = 0, seconds: float = 1.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 0.1, round(seconds * RATE)).astype(np.float32)


@cache
def spoken(seconds: float = 4.0) -> bytes:
    """A WAV file of speech, with a second of silence before and behind it."""
    audio, rate = decode_file((Path(__file__).parents[4] / "docs/demo-voice.mp3").read_bytes(), "demo")
    file = io.BytesIO()
    quiet = np.zeros(rate, np.float32)
    speech = audio[: round(seconds * rate)] * np.linspace(1, 0, round(seconds * rate), dtype=np.float32) ** 0.1
    soundfile.write(file, np.concatenate([quiet, speech, quiet]), rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


def wav(seed: int = 0, seconds: float = 1.0) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, hiss(seed, seconds), RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


class Server:
    """One ingress replica on a store, with API keys where names are given."""

    def __init__(
        self,
        folder: Path | str,
        *names: str,
        admins: tuple[str, ...] = (),
        voices: VoiceSettings | None = None,
        forget: Forget = forget_nothing,
        synthesizer: FakeSynthesizer | None = None,
    ) -> None:
        self.synthesizer = synthesizer or FakeSynthesizer(BASE, script=utterance())
        settings = voices or VoiceSettings()
        self.settings = settings.model_copy(update={"store": str(folder)})
        self.voices = open_voices(self.settings, forget=forget)
        self.texts = LiveTexts()  # whoever has it listen closes it
        file = Path(folder).parent / "keys.json" if names or admins else None
        self.keys: dict[str, str] = {}
        if file is not None:
            self.keys = {name: create_key(file, name, admin=name in admins) for name in (*names, *admins)}
        self.file = file
        self.api = self.surface()

    def surface(self) -> FastAPI:
        access = AccessSettings(keys_file=self.file)
        settings = ApiSettings(access=access, voices=self.settings)
        return one_api(self.synthesizer, settings, opened={"live": self.texts, "voices": self.voices})

    def client(self, name: str | None = None) -> httpx.AsyncClient:
        return client_of(self.api, {"authorization": f"Bearer {self.keys[name]}"} if name else None)


async def store(client: httpx.AsyncClient, name: str, *, seed: int = 0, **fields: str) -> dict[str, object]:
    """A new voice, as the client that stored it is told of it."""
    answer = await client.post(
        "/v1/audio/voices", data={"name": name, **fields}, files={"audio_sample": ("a.wav", wav(seed), "audio/wav")}
    )
    assert answer.status_code == 200, answer.text
    told: dict[str, object] = answer.json()
    return told


async def speak_and_derive(server: Server) -> Reference:
    """Speak one sentence, whose replica answers with what it derived; returns the recording that it was sent."""
    async with server.client() as client:
        answer = await client.post("/v1/audio/speech", json={"input": "Hi.", "voice": "ada"})
    assert answer.status_code == 200, answer.text
    reference = server.synthesizer.requests[-1].reference
    assert reference is not None
    clone_prompts.store_clone_prompt(reference, ClonePrompt(np.ones(8, np.float32), np.ones((3, 16), np.int16)))
    return reference


def files_in(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]
