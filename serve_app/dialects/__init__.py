"""Every dialect, and our own routes beside them. One more is a module with a `DIALECT`, and its row here."""

from serve_app.dialects import (
    cartesia,
    cartesia_lexicons,
    codec_frames,
    dashscope,
    deepgram,
    elevenlabs,
    elevenlabs_designs,
    elevenlabs_lexicons,
    elevenlabs_sockets,
    flux,
    kokoro,
    mistral,
    nari,
    native,
    openai_models,
    openai_speech,
    realtime,
    vllm_omni,
    voxserve,
)
from serve_app.dialects.dialect import Dialect
from serve_app.own_routes import designed_voices, jobs, stored_voices

# `Dialect` says what this order decides.
_MODULES = (
    openai_speech,
    mistral,
    deepgram,
    flux,
    elevenlabs,
    elevenlabs_sockets,
    elevenlabs_designs,
    elevenlabs_lexicons,
    cartesia,
    cartesia_lexicons,
    realtime,
    dashscope,
    vllm_omni,
    designed_voices,  # before stored_voices, for which design would be the name of a voice
    stored_voices,
    voxserve,
    kokoro,
    codec_frames,
    native,
    nari,
    jobs,
    openai_models,
)
DIALECTS: tuple[Dialect, ...] = tuple(module.DIALECT for module in _MODULES)
