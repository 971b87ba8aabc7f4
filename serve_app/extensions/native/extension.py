from serve_app.extension import Extension
from serve_app.extensions.native import codec_frames, native

EXTENSION = Extension("native", requires=("live",), dialects=(codec_frames.DIALECT, native.DIALECT))
