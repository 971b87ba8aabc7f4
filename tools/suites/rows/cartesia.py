"""Cartesia: speech, and dictionaries."""

from serve_app.extension import Sample
from tools.suites.documented import Documented, Place, fields
from tools.suites.row import (
    Closing,
    End,
    Owned,
    PostRow,
    Rows,
    SocketRow,
    Stop,
    WordTimesForm,
    by_path,
    context,
    samples_of,
)

SAMPLES = samples_of("cartesia")
CARTESIA = dict(SAMPLES["Cartesia"].messages[0])
FLOATS = {"container": "raw", "encoding": "pcm_f32le", "sample_rate": 44100}
CALM = {"speed": 1.1, "emotion": "calm"}
SOCKETS = {
    "cartesia": SocketRow(
        SAMPLES["Cartesia"],
        ends_with={"type": "done"},
        invalid=[
            ({**CARTESIA, "transcript": 5}, "transcript is required"),
            ({**CARTESIA, "output_format": {"container": "raw", "encoding": "pcm_s24"}}, "output_format.encoding"),
        ],
        invalid_reply={"type": "error", "done": True},
        numbers=['{"transcript": "a", "output_format": {"bit_rate": ?}}'],
        more=[
            {**CARTESIA, "continue": True, "output_format": FLOATS, "generation_config": CALM},
            {**CARTESIA, "add_timestamps": True, "flush": True},
            context(transcript="", flush=True, **{"continue": False}),
            context(cancel=True),
        ],
        split_utterance=[{**CARTESIA, "continue": True}, context(transcript="", **{"continue": False})],
        stop=Stop(context(cancel=True)),
        closing=Closing(full=None, failed=None),
        times=WordTimesForm("word_timestamps", asked_by={"add_timestamps": True}),
        is_continued=False,  # a context is the conversation
    ),
}

POSTS = by_path(
    PostRow(
        Sample("/tts/bytes", body={"transcript": "$text", "voice": {"id": "$voice"}}),
        "transcript",
        "Cartesia",
        [('{"transcript": "x", "output_format": {"container": "mp3", "bit_rate": ?}}', "bit_rate")],
        wrong=[({"generation_config": {"speed": 9}}, "speed")],
        formats=[
            ("", {"output_format": {"container": "?"}}, "mp3"),
            ("", {"output_format": {"container": "raw", "encoding": "?"}}, "pcm_mulaw"),
        ],
        more={"output_format": {"container": "wav"}},
    ),
    PostRow(
        Sample("/tts/sse", body={"transcript": "$text", "voice": "$voice"}),
        "transcript",
        end=End("events"),
        more={"language": None, "add_timestamps": True},
        times=WordTimesForm("word_timestamps", asked_by={"add_timestamps": True}),
    ),
)
PLACES: list[Place] = [
    Place(
        fields(
            "model_id: sonic-3, voice: nobody, language: de, add_timestamps: true, "
            "add_phoneme_timestamps: true, use_normalized_timestamps: true, "
            "pronunciation_dict_id: a, speed: fast, save: true"
        )
    ),
    Place({"id": "ryan", "mode": "embedding", "embedding": [0.5]}, inside="voice"),
    Place({"encoding": "pcm_mulaw", "sample_rate": 8000, "bit_rate": 32000}, inside="output_format"),
    Place({"speed": 2.0, "volume": 1.5, "emotion": "sad"}, inside="generation_config"),
]
OVER_HTTP = [*PLACES, Place({"context_id": "a", "continue": True})]
CONTAINER = Place({"container": "wav"}, inside="output_format")
CONTEXT = {"context_id": "one"}
DOCUMENTED = {
    "Cartesia, bytes": Documented(
        "/tts/bytes", [{"transcript": "Hello."}], [CONTAINER, *OVER_HTTP], style=("emotion",)
    ),
    "Cartesia, events": Documented("/tts/sse", [{"transcript": "Hello."}], OVER_HTTP),
    "Cartesia, WebSocket": Documented(
        "/tts/websocket",
        [{**CONTEXT, "transcript": "Hello. ", "continue": True}, {**CONTEXT, "transcript": "", "continue": False}],
        [*PLACES, CONTAINER, Place({"max_buffer_delay_ms": 5, "flush": True, "duration": 5, "continue": False})],
        ends_with={"type": "done"},
        style=("emotion",),
        language="language",
    ),
}
OWNED = {"dictionary_id": Owned("/pronunciation-dicts/", {"name": "it", "items": [{"text": "SQL", "alias": "sequel"}]})}
ROWS = Rows(SOCKETS, POSTS, DOCUMENTED, OWNED, ["/voices/clone", "/pronunciation-dicts", "/pronunciation-dicts/"])
