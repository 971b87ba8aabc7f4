"""Talkray's own socket, and codec frames."""

from serve_app.extension import Sample
from tools.suites.documented import Documented, Json, Place, Sent
from tools.suites.row import Closing, PostRow, Rows, SocketRow, Stop, WordTimesForm
from tools.suites.rows.core import OPENAI_SPEECH, QWEN, SPEECH, SPOKEN

NATIVE: tuple[Json, ...] = ({"type": "speak", **SPEECH},)
SOCKETS = {
    "native": SocketRow(
        Sample("/v1/audio/speech/ws", NATIVE),
        ends_with={"type": "done"},
        invalid=[({"type": "sing"}, "type"), ({"type": "speak"}, "input"), ({**NATIVE[0], "voice": "nobody"}, "voice")],
        numbers=['{"type": "speak", "input": "a", "voice": "ryan", "from_frame": ?}'],
        stop=Stop({"type": "cancel"}, {"type": "cancelled"}),
        closing=Closing(failed=None),
        unspeakable={"type": "error"},
        busy="busy",
        is_strict=True,
        times=WordTimesForm("words", asked_by={"word_timestamps": True}),
    ),
    "frames": SocketRow(
        Sample("/v1/audio/frames/ws", NATIVE),
        ends_with={"type": "done"},
        invalid=[({"type": "x"}, "type"), ({**NATIVE[0], "speed": 2}, "speed"), ({**NATIVE[0], "voice": "x"}, "voice")],
        numbers=['{"type": "speak", "input": "a", "voice": "ryan", "top_k": ?}'],
        more=[{"type": "speak", "input": "$text", "voice": "ash", "seed": 5}],
        stop=Stop({"type": "cancel"}, {"type": "cancelled"}),
        is_pcm=False,
        closing=Closing(full=None, failed=None),
        unspeakable={"type": "error"},
        busy="busy",
        is_strict=True,
        is_continued=False,  # without audio, no end of it
    ),
}

FRAMES: Json = {**QWEN, "voice": "ryan", "stream": False}
OVER_SOCKET: Json = {name: value for name, value in OPENAI_SPEECH.items() if name != "any_language"}
OVER_SOCKET |= {"word_timestamps": True, "request_id": "mine", "from_frame": Sent(1, {"seed": 7})}
SPEAK, DONE = {**SPOKEN, "type": "speak"}, {"type": "done"}
DOCUMENTED = {
    "codec frames": Documented("/v1/audio/frames", [SPOKEN], [Place(FRAMES)]),
    "codec frames, WebSocket": Documented("/v1/audio/frames/ws", [SPEAK], [Place(FRAMES)], ends_with=DONE),
    "Talkray, WebSocket": Documented("/v1/audio/speech/ws", [SPEAK], [Place(OVER_SOCKET)], ends_with=DONE),
}
ROWS = Rows(
    sockets=SOCKETS,
    posts={"/v1/audio/frames": PostRow(Sample("/v1/audio/frames", body=SPEECH), "input", more={"seed": 5})},
    documented=DOCUMENTED,
)
