from serve_app.extension import Extension
from serve_app.extensions.deepgram import deepgram, flux

EXTENSION = Extension("deepgram", requires=("live",), dialects=(deepgram.DIALECT, flux.DIALECT))
