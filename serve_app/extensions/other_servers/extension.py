from serve_app.extension import Extension
from serve_app.extensions.other_servers import kokoro, mistral, nari, vllm_omni, voxserve
from serve_app.extensions.other_servers.spellings import Spellings

EXTENSION = Extension(
    "other_servers",
    requires=("live",),
    dialects=(mistral.DIALECT, vllm_omni.DIALECT, voxserve.DIALECT, kokoro.DIALECT, nari.DIALECT),
    open=lambda context: Spellings(),
)
