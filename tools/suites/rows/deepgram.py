"""Deepgram: Aura and Flux."""

from serve_app.extension import Sample
from tools.suites.documented import Documented, Json, Place, Sent, fields, messages
from tools.suites.row import Closing, PostRow, Rows, SocketRow, Stop, WordTimesForm, by_path, samples_of

SAMPLES = samples_of("deepgram")
OFFSET = {"type": "Interrupt", "playback_offset": {"type": "time_ms", "value": 50}}
SOCKETS = {
    "deepgram": SocketRow(
        SAMPLES["Deepgram"],
        failure_type="Error",
        ends_with={"type": "Flushed"},
        invalid=[({"type": "Sing"}, "type must be Speak"), ({"type": "Speak"}, "text is required")],
        invalid_reply={"type": "Warning"},
        closing=Closing(drain={"type": "Close"}),
        numbers=['{"type": "Speak", "text": "a", "x": ?}'],
        more=[{"type": "Clear"}, {"type": "Close"}],
        split_utterance=SAMPLES["Deepgram"].messages,
        stop=Stop({"type": "Clear"}, {"type": "Cleared"}),
        queries=["model=aura-2-ryan-en&encoding=linear16&sample_rate=24000&speed=1.1", "encoding=mulaw"],
    ),
    "flux": SocketRow(
        SAMPLES["Deepgram Flux"],
        failure_type="Error",
        ends_with={"type": "SpeechMetadata"},
        invalid=[({"type": "Sing"}, "type must be Speak"), ({"type": "Speak"}, "text is required")],
        invalid_reply={"type": "Warning", "code": "MESSAGE-0000"},
        closing=Closing(drain={"type": "Close"}),
        queries=["model=flux-ryan-en&encoding=mulaw&sample_rate=8000"],
        numbers=[
            '{"type": "Interrupt", "playback_offset": {"type": "time_ms", "value": ?}}',
            '{"type": "Configure", "speed": ?}',
        ],
        more=[OFFSET, {"type": "Configure", "speed": 1.1}, {"type": "Close"}],
        split_utterance=SAMPLES["Deepgram Flux"].messages,
        stop=Stop({"type": "Interrupt"}, {"type": "SpeechInterrupted"}),
        times=WordTimesForm("text_spoken"),
    ),
}

FORMAT = [("encoding=?", Json(), "linear16")]
POSTS = by_path(
    PostRow(
        Sample("/v1/speak?model=$voice", body={"text": "$text"}),
        name="Deepgram",
        formats=FORMAT,
        query_numbers=[
            ("encoding=mp3&bit_rate=", "bit_rate"),
            ("speed=", "speed"),
            ("encoding=linear16&sample_rate=", "sample_rate"),
        ],
    ),
    PostRow(
        Sample("/v2/speak?model=flux-$voice-en", body={"text": "$text"}),
        query_numbers=[("speed=", "speed")],
        formats=FORMAT,
    ),
)
QUERY: Json = fields(
    "model: aura-2-ryan-en, encoding: mulaw, sample_rate: '8000', speed: '1.5', mip_opt_out: 'true', "
    "tag: a, expressivity: '1'"
)
REST: Json = QUERY | fields("bit_rate: '32000', callback: 'http://a', callback_method: PUT")
REST |= {"container": Sent("none", {"encoding": "linear16"})}
OVER_SOCKET = [Place({**QUERY, "container": "wav"}, None)]
SAYS, CLOSED = messages("type: Speak, text: Hello.", "type: Close"), {"closed": 1000}
DOCUMENTED = {
    "Deepgram": Documented(
        "/v1/speak", [{"text": "Hello."}], [Place(REST, None), Place({"text": "Bye.", "model": "a", "x": 1})]
    ),
    "Deepgram, WebSocket": Documented("/v1/speak", SAYS, OVER_SOCKET, ends_with=CLOSED),
    "Flux": Documented("/v2/speak", [{"text": "Hello."}], [Place(REST, None)]),
    "Flux, WebSocket": Documented("/v2/speak", SAYS, OVER_SOCKET, ends_with=CLOSED),
}
ROWS = Rows(SOCKETS, POSTS, DOCUMENTED)
