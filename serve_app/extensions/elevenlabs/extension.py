from serve_app.extension import Extension
from serve_app.extensions.elevenlabs import designs, elevenlabs, lexicons, sockets

EXTENSION = Extension(
    "elevenlabs",
    requires=("voices", "designs", "live"),
    dialects=(elevenlabs.DIALECT, sockets.DIALECT, designs.DIALECT, lexicons.DIALECT),
)
