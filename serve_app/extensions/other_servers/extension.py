from serve_app.extension import Extension
from serve_app.extensions.other_servers import kokoro, mistral, nari, spellings, vllm_omni, voxserve

EXTENSION = Extension(
    "other_servers",
    requires=("live",),
    dialects=(mistral.DIALECT, vllm_omni.DIALECT, voxserve.DIALECT, kokoro.DIALECT, nari.DIALECT),
    hooks=spellings.SpellingHooks(),
)
