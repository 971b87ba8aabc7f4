from serve_app.api.resolve.offer import Offer
from serve_app.extension import Extension, Opened
from serve_app.extensions.word_times.word_times import WordTimes


class Timing(Opened):
    """Times the words of every text whose request asks for it."""

    def join(self, offer: Offer) -> None:
        offer.time_words = WordTimes
        offer.fields.add("word_timestamps")


EXTENSION = Extension("word_times", open=lambda opening: Timing())
