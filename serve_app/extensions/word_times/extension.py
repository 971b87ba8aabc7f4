from serve_app.api.resolve.resolver import Resolver
from serve_app.extension import Extension, ExtensionState
from serve_app.extensions.word_times.word_times import WordTimes


class Timing(ExtensionState):
    """Extension object that adds word times to the requests with `word_timestamps`."""

    def install(self, resolver: Resolver) -> None:
        resolver.time_words = WordTimes


EXTENSION = Extension("word_times", open=lambda context: Timing())
