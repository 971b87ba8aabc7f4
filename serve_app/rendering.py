"""The audio of one response on its way from PCM to the bytes that are sent."""

import asyncio

from serve_app.audio import AudioFormat, Encoder, open_encoder
from serve_app.delivery import Delivery
from serve_app.tempo import Tempo


class Rendering:
    """Speed, then encoding. What takes milliseconds runs in a thread, away from the other streams' event loop."""

    def __init__(self, delivery: Delivery, sample_rate: int, frame_samples: int) -> None:
        self._delivery = delivery
        self._sample_rate = sample_rate
        self._frame_samples = frame_samples
        self._tempo = Tempo(delivery.speed, sample_rate) if delivery.speed != 1 else None
        self._collected = bytearray()  # stretched PCM of a whole body
        self._encoder: Encoder | None = None if delivery.whole else self._open()
        cheap = delivery.audio_format in (AudioFormat.PCM, AudioFormat.WAV)
        self._threaded = self._tempo is not None or not cheap

    async def feed(self, pcm: bytes) -> bytes:
        """The bytes that `pcm` makes available; none before `close` for a whole body."""
        return await asyncio.to_thread(self._feed, pcm) if self._threaded and pcm else self._feed(pcm)

    async def close(self) -> bytes:
        """The rest of the body."""
        return await asyncio.to_thread(self._close) if self._threaded else self._close()

    def _feed(self, pcm: bytes) -> bytes:
        return self._encode(self._tempo.stretch(pcm) if self._tempo else pcm)

    def _close(self) -> bytes:
        rest = self._encode(self._tempo.close()) if self._tempo else b""
        if self._encoder is not None:
            return rest + self._encoder.close()
        encoder = self._open(len(self._collected))
        return encoder.encode(bytes(self._collected)) + encoder.close()

    def _encode(self, pcm: bytes) -> bytes:
        if self._encoder is not None:
            return self._encoder.encode(pcm)
        self._collected += pcm
        return b""

    def _open(self, num_bytes: int | None = None) -> Encoder:
        return open_encoder(
            self._delivery.audio_format, self._sample_rate, frame_samples=self._frame_samples, num_bytes=num_bytes
        )
