"""Every dialect. One more is a module with a `DIALECT`, and its row here."""

from serve_app.dialects import (
    batches,
    cartesia,
    codec_frames,
    dashscope,
    deepgram,
    elevenlabs,
    elevenlabs_designs,
    elevenlabs_lexicons,
    elevenlabs_sockets,
    flux,
    jobs,
    kokoro,
    nari,
    native,
    openai_speech,
    realtime,
    stored_voices,
    vllm_omni,
    voice_design,
    voxserve,
)
from serve_app.dialects.table import Dialect

_MODULES = (
    *(openai_speech, deepgram, flux, elevenlabs, elevenlabs_sockets, elevenlabs_designs, elevenlabs_lexicons),
    # voice_design before stored_voices, for which "design" would be the name of a voice.
    *(cartesia, realtime, dashscope, vllm_omni, voice_design, stored_voices, voxserve, kokoro, codec_frames, native),
    *(nari, jobs, batches),
)
# In the order of /docs; of several keys that a request has, the first header's counts.
DIALECTS: tuple[Dialect, ...] = tuple(module.DIALECT for module in _MODULES)
