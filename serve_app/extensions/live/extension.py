from serve_app.extension import Extension
from serve_app.extensions.live.live_text import LiveTexts

EXTENSION = Extension(
    "live",
    requires=("text", "word_times", "continuity"),
    open=lambda opening: LiveTexts() if opening.node is None else LiveTexts(opening.node.address),
)
