"""Rows that describe `house_dialect.py` to the shared tests. docs/add-extension.md says where to save them."""

from serve_app.extension import Sample
from tools.suites.documented import Documented, Place, fields, messages
from tools.suites.row import PostRow, Rows, SocketRow, Stop, by_path, samples_of

SAMPLES = samples_of("house")
SOCKETS = {
    "house": SocketRow(
        SAMPLES["House"],
        ends_with={"type": "spoken"},
        invalid=[({"type": "sing"}, "type"), ({"type": "words"}, "words")],
        numbers=['{"type": "words", "words": ?}'],
        more=[{"type": "stop"}],
        stop=Stop({"type": "stop"}, {"type": "stopped"}),
        split_utterance=SAMPLES["House"].messages,
    )
}
POSTS = by_path(
    PostRow(
        Sample("/house/say", body={"words": "$text", "who": "$voice"}),
        "words",
        "House",
        formats=[("", {"as": "?"}, "wav")],
        wrong=[({"as": "flac"}, "as"), ({"words": 7}, "words")],
        more={"as": "pcm"},
    )
)
DOCUMENTED = {
    "House": Documented("/house/say", [{"words": "Hello."}], [Place(fields("words: Bye., who: ryan, as: pcm"))]),
    "House, WebSocket": Documented(
        "/house/live",
        messages("type: words, words: Hello.", "type: over"),
        [Place(fields("who: ryan"), None)],
        ends_with={"type": "spoken"},
    ),
}
ROWS = Rows(SOCKETS, POSTS, DOCUMENTED)
