from serve_app.extension import Extension
from serve_app.extensions.text import text_route

EXTENSION = Extension("text", dialects=(text_route.DIALECT,))
