import logging

from deployments.errors import StartError
from serve_app.extension import Extension, OpenContext, forget_nothing
from serve_app.extensions.voices import voice_routes
from serve_app.extensions.voices.library import Forget, Voices
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.extensions.voices.voice_store import VoiceStore, default_folder, folder_of

logger = logging.getLogger(__name__)


def open_voices(settings: VoiceSettings, *, num_nodes: int = 1, forget: Forget = forget_nothing) -> Voices:
    """Open the voice store that `settings` select. Raises StartError if several nodes would not share the store."""
    location = settings.store
    if location is None and num_nodes > 1:
        reason = "the nodes of this cluster do not share a folder. Set api.voices.store to a bucket"
        return Voices(None, settings, why_not=f"The server cannot store voices: {reason}.", forget=forget)
    if location is None:
        try:
            return Voices(VoiceStore(str(default_folder())), settings, forget=forget)
        except StartError as error:
            logger.warning("the server cannot store voices: %s", error)
            why_not = "The server cannot store voices, because its folder is not usable. Set api.voices.store."
            return Voices(None, settings, why_not=why_not, forget=forget)
    if num_nodes > 1 and folder_of(location) is not None:
        raise StartError(
            f"api.voices.store: the {num_nodes} nodes of this cluster do not share the folder {location}. "
            "Use a bucket (s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH)"
        )
    return Voices(VoiceStore(location), settings, forget=forget)


def open_library(context: OpenContext) -> Voices:
    settings, node = context.settings.of(VoiceSettings), context.node
    return (
        open_voices(settings) if node is None else open_voices(settings, num_nodes=node.num_nodes, forget=node.forget)
    )


EXTENSION = Extension(
    "voices", settings=VoiceSettings, requires=("text",), dialects=(voice_routes.DIALECT,), open=open_library
)
