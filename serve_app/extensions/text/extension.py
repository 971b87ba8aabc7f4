from serve_app.extension import Extension
from serve_app.extensions.text import text_route
from serve_app.extensions.text.reading import TextReading
from serve_app.extensions.text.settings import TextSettings

EXTENSION = Extension("text", settings=TextSettings, dialects=(text_route.DIALECT,), open=lambda opening: TextReading())
