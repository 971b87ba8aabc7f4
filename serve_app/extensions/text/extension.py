from serve_app.extension import Extension
from serve_app.extensions.text import reading

EXTENSION = Extension("text", settings=reading.TextSettings, dialects=(reading.DIALECT,), hooks=reading.TextHooks())
