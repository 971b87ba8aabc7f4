"""DashScope: one request, and its realtime socket."""

from serve_app.extension import Sample
from tools.suites.documented import Documented, Json, Place, Sent, fields, messages
from tools.suites.row import Closing, End, PostRow, Rows, SocketRow, Stop, by_path, response, samples_of, update

SAMPLES = samples_of("dashscope")
COMMITTED: tuple[Json, ...] = (
    update(mode="commit", voice="$voice"),
    {"type": "input_text_buffer.append", "text": "$text"},
    {"type": "input_text_buffer.commit"},
)
CHERRY: Json = {"voice": "Cherry", "mode": "commit", "language_type": "English"}
SOCKETS = {
    "dashscope": SocketRow(
        SAMPLES["DashScope"],
        over=response("completed"),
        refused=[
            ({"type": "nonsense"}, "type"),
            ({"type": "session.update"}, "session"),
            (update(mode="eager"), "session"),
            (update(response_format="flac"), "response_format"),
            (update(sample_rate=5), "sample_rate"),
            ({"type": "input_text_buffer.append", "text": 5}, "text"),
        ],
        numbers=[
            '{"type": "session.update", "session": {"bit_rate": ?}}',
            '{"type": "session.update", "session": {"any": ?}}',
        ],
        more=[
            update(**CHERRY, response_format="wav", sample_rate=24000, speech_rate=1.1, bit_rate=64),
            {"type": "input_text_buffer.commit"},
            {"type": "input_text_buffer.clear"},
            {"type": "response.cancel"},
        ],
        stop=Stop({"type": "response.cancel"}, response("cancelled")),
        closing=Closing(goes_on=False),
        cut=SAMPLES["DashScope"].messages,
    ),
    "dashscope-commit": SocketRow(
        Sample(SAMPLES["DashScope"].path, COMMITTED),
        over=response("completed"),
        refused=[(update(mode="eager"), "session")],
        numbers=['{"type": "session.update", "session": {"speech_rate": ?}}'],
        more=[{"type": "session.finish"}],
        again=COMMITTED[1:],
        cut=[*COMMITTED[:2], {"type": "session.finish"}],
        stop=Stop({"type": "response.cancel"}, response("cancelled")),
    ),
}

REST = "/api/v1/services/aigc/multimodal-generation/generation"
POSTS = by_path(
    PostRow(
        Sample(REST, body={"model": "qwen-tts", "input": {"text": "$text", "voice": "$voice"}}),
        "input",
        "DashScope",
        [('{"model": "q", "input": {"text": "x"}, "parameters": {"bit_rate": ?}}', "bit_rate")],
        wrong=[({"parameters": {"speech_rate": 99}}, "speech_rate")],
        formats=[("", {"parameters": {"response_format": "?"}}, "opus")],
        whole=("", {"parameters": {"response_format": "pcm"}}, ("output", "audio", "data")),
        end=End("events", headers={"x-dashscope-sse": "enable"}),
        more={"parameters": {"speech_rate": 1.1}},
    ),
)
FIELDS: Json = {
    **fields(
        "voice: ryan, response_format: mp3, sample_rate: 8000, language_type: German, speech_rate: 2.0, "
        "pitch_rate: 1.5, volume: 80, instructions: Softly., optimize_instructions: true, enable_tn: true"
    ),
    "bit_rate": Sent(64, {"response_format": "opus"}),
}
DOCUMENTED = {
    "DashScope": Documented(
        REST,
        [{"model": "qwen3-tts", "input": {"text": "Hello."}}],
        [
            Place({"model": "qwen3-tts-flash", "task": "tts"}),
            Place({**FIELDS, "text": "Bye."}, inside="input"),
            Place(FIELDS, inside="parameters"),
        ],
        style=("instructions",),
        language="language_type",
    ),
    "DashScope, WebSocket": Documented(
        "/api-ws/v1/realtime",
        messages(
            "type: session.update, session: {}",
            "type: input_text_buffer.append, text: Hello.",
            "type: session.finish",
        ),
        [Place({"model": "qwen3-tts-flash"}, None), Place({**FIELDS, "mode": "commit"}, inside="session")],
        over={"closed": 1000},
        style=("instructions",),
    ),
}
ROWS = Rows(SOCKETS, POSTS, DOCUMENTED)
