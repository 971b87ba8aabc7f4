from serve_app.extension import Extension, Opening
from serve_app.extensions.live.live_text import LiveTexts


def open_texts(opening: Opening) -> LiveTexts:
    return LiveTexts() if opening.node is None else LiveTexts(opening.node.address)


EXTENSION = Extension("live", requires=("text", "word_times", "continuity"), open=open_texts)
