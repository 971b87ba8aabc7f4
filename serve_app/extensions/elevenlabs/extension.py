from serve_app.extension import Extension
from serve_app.extensions.elevenlabs import elevenlabs, lexicons, sockets, stored

EXTENSION = Extension(
    "elevenlabs",
    requires=("voices", "designs", "live"),
    dialects=(elevenlabs.DIALECT, sockets.DIALECT, stored.DIALECT, lexicons.DIALECT),
)
