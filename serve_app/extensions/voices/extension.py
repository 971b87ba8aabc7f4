from serve_app.extension import Extension
from serve_app.extensions.voices import voice_routes

EXTENSION = Extension("voices", dialects=(voice_routes.DIALECT,))
