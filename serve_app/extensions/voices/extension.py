from serve_app.extension import Extension, Opening
from serve_app.extensions.voices import voice_routes
from serve_app.extensions.voices.library import Voices
from serve_app.extensions.voices.opening import open_voices
from serve_app.extensions.voices.settings import VoiceSettings


def open_library(opening: Opening) -> Voices:
    settings, node = opening.settings.of(VoiceSettings), opening.node
    return (
        open_voices(settings) if node is None else open_voices(settings, num_nodes=node.num_nodes, forget=node.forget)
    )


EXTENSION = Extension(
    "voices", settings=VoiceSettings, requires=("text",), dialects=(voice_routes.DIALECT,), open=open_library
)
