from typing import cast

from serve_app.extension import Extension
from serve_app.extensions.designs import designs
from serve_app.extensions.voices.library import Voices

EXTENSION = Extension(
    "designs",
    requires=("voices", "models"),
    dialects=(designs.DIALECT,),
    # The route that stores voices uses these designs with this ingress's voice library.
    open=lambda context: designs.VoiceDesigns(cast("Voices", context.opened["voices"])),
)
