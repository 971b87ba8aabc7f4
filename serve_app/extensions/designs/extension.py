from collections.abc import Awaitable, Callable
from functools import partial

from serve_app.extension import Extension, Opening
from serve_app.extensions.designs import design_routes
from serve_app.extensions.designs.designs import lock
from serve_app.extensions.voices.library import Voices
from serve_app.extensions.voices.stored_voice import StoredVoice


def open_lock(opening: Opening) -> Callable[..., Awaitable[StoredVoice]]:
    """`lock` in the voices of this ingress, for the route that stores voices."""
    voices = opening.opened["voices"]
    assert isinstance(voices, Voices)
    return partial(lock, voices)


EXTENSION = Extension("designs", requires=("voices", "models"), dialects=(design_routes.DIALECT,), open=open_lock)
