from serve_app.extension import Extension
from serve_app.extensions.deepgram import deepgram

EXTENSION = Extension("deepgram", requires=("live",), dialects=(deepgram.AURA, deepgram.FLUX))
