from serve_app.extension import Extension
from serve_app.extensions.realtime import realtime

EXTENSION = Extension("realtime", requires=("live",), dialects=(realtime.DIALECT,))
