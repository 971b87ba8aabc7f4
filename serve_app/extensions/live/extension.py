from serve_app.extension import Extension
from serve_app.extensions.live.live_text import LiveTexts

EXTENSION = Extension(
    "live",
    requires=("text", "word_times", "continuity"),
    open=lambda context: LiveTexts() if context.node is None else LiveTexts(context.node.address),
)
