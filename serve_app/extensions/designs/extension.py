from functools import partial
from typing import cast

from serve_app.extension import Extension
from serve_app.extensions.designs import designs
from serve_app.extensions.voices.library import Voices

EXTENSION = Extension(
    "designs",
    requires=("voices", "models"),
    dialects=(designs.DIALECT,),
    # The route that stores voices calls `lock` with the voice library of this ingress.
    open=lambda opening: partial(designs.lock, cast("Voices", opening.opened["voices"])),
)
