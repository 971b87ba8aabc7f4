from serve_app.api.resolve.resolver import RequestHooks
from serve_app.extension import Extension
from serve_app.extensions.word_times.word_times import WordTimes


class WordTimeHooks(RequestHooks):
    """Adds word times to the requests with `word_timestamps`."""

    time_words = WordTimes


EXTENSION = Extension("word_times", hooks=WordTimeHooks())
