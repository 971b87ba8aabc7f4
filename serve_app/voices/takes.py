"""From a file that was sent to a take of a voice."""

import hashlib
import io

import numpy as np

from serve_app.audio.reference_doctor import Preparation, check_recording
from serve_app.voices.record import Take


def read_take(data: bytes, *, text: str | None, style: str, prepare: Preparation, field: str) -> tuple[Take, bytes]:
    """The recording as it is kept, and its FLAC file in one channel. Raises InvalidRequest about `field`. Blocks."""
    import soundfile

    text = " ".join((text or "").split()) or None
    checked = check_recording(data, field=field, transcript=text, heard=None, prepare=prepare)
    file = io.BytesIO()
    # 24 bits hold every sample of 16, and the mean of two channels of them. Louder than full scale would wrap around.
    samples = np.clip(checked.audio, -1, 1 - 2**-23)
    soundfile.write(file, samples, checked.sample_rate, format="FLAC", subtype="PCM_24")
    flac = file.getvalue()
    take = Take(
        style=style,
        sha256=hashlib.sha256(flac).hexdigest(),
        seconds=round(len(samples) / checked.sample_rate, 3),
        num_bytes=len(flac),
        text=text,
        changes=checked.changes,
        flaws=checked.flaws,
    )
    return take, flac
