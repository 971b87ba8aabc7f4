from functools import partial
from typing import cast

from serve_app.extension import Extension
from serve_app.extensions.designs import designs
from serve_app.extensions.voices.library import Voices

EXTENSION = Extension(
    "designs",
    requires=("voices", "models"),
    dialects=(designs.DIALECT,),
    # `lock` in the voices of this ingress, for the route that stores voices.
    open=lambda opening: partial(designs.lock, cast("Voices", opening.opened["voices"])),
)
