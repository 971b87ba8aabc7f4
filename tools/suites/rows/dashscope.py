"""DashScope: one request, and its realtime socket."""

from serve_app.extension import Sample
from serve_app.extensions.dashscope.tasks import task_message as task
from tools.suites.documented import Documented, Json, Place, Sent, fields, messages
from tools.suites.row import Closing, End, PostRow, Rows, SocketRow, Stop, by_path, response, samples_of, update

SAMPLES = samples_of("dashscope")
COMMITTED: tuple[Json, ...] = (
    update(mode="commit", voice="$voice"),
    {"type": "input_text_buffer.append", "text": "$text"},
    {"type": "input_text_buffer.commit"},
)
RUN, SAY, FINISH = SAMPLES["DashScope, SpeechSynthesizer"].messages
CHERRY: Json = {"voice": "Cherry", "mode": "commit", "language_type": "English"}
SOCKETS = {
    "dashscope": SocketRow(
        SAMPLES["DashScope"],
        ends_with=response("completed"),
        invalid=[
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
        closing=Closing(stays_open=False, farewell="session.finished"),
        split_utterance=SAMPLES["DashScope"].messages,
    ),
    "dashscope-commit": SocketRow(
        Sample(SAMPLES["DashScope"].path, COMMITTED),
        ends_with=response("completed"),
        invalid=[(update(mode="eager"), "session")],
        numbers=['{"type": "session.update", "session": {"speech_rate": ?}}'],
        more=[{"type": "session.finish"}],
        next_utterance=COMMITTED[1:],
        split_utterance=[*COMMITTED[:2], {"type": "session.finish"}],
        is_live=False,
        stop=Stop({"type": "response.cancel"}, response("cancelled")),
    ),
    "dashscope-task": SocketRow(
        SAMPLES["DashScope, SpeechSynthesizer"],
        ends_with={"type": "task-finished"},
        failure_type="task-failed",
        invalid=[
            ({"type": "nonsense"}, "header"),
            (task("nonsense"), "type"),
            (task("continue-task", input={"text": "x"}), "task_id"),
            (task("finish-task", input={}), "task_id"),
            (task("run-task", parameters={"format": "flac"}), "format"),
            (task("run-task", parameters={"rate": 99}), "rate"),
        ],
        invalid_reply={"type": "task-failed"},
        numbers=['{"header": {"action": "run-task", "task_id": "a"}, "payload": {"parameters": {"rate": ?}}}'],
        more=[task("continue-task", input={"flush": True}), {**RUN, "payload": {"input": {"text": "$text"}}}],
        split_utterance=(RUN, SAY, FINISH),
        stop=Stop(task("finish-task", input={"directive": "cancel"}), {"type": "task-finished"}),
        unspeakable={"type": "task-failed"},
        is_continued=False,  # a task is the conversation
    ),
}

REST = "/api/v1/services/aigc/multimodal-generation/generation"
SYNTHESIZER = "/api/v1/services/audio/tts/SpeechSynthesizer"


def post(path: str, audio_format: str, rate: str, *, name: str = "") -> PostRow:
    return PostRow(
        Sample(path, body={"model": "qwen-tts", "input": {"text": "$text", "voice": "$voice"}}),
        "input",
        name,
        [('{"model": "q", "input": {"text": "x"}, "parameters": {"bit_rate": ?}}', "bit_rate")],
        wrong=[({"parameters": {rate: 99}}, rate)],
        formats=[("", {"parameters": {audio_format: "?"}}, "opus")],
        whole=("", {"parameters": {audio_format: "pcm"}}, ("output", "audio", "data")),
        end=End("events", headers={"x-dashscope-sse": "enable"}),
        more={"parameters": {rate: 1.1}},
    )


POSTS = by_path(post(REST, "response_format", "speech_rate", name="DashScope"), post(SYNTHESIZER, "format", "rate"))
FIELDS: Json = {
    **fields(
        "voice: ryan, response_format: mp3, sample_rate: 8000, language_type: German, speech_rate: 2.0, "
        "pitch_rate: 1.5, volume: 80, instructions: Softly., optimize_instructions: true, enable_tn: true"
    ),
    "bit_rate": Sent(64, {"response_format": "opus"}),
}
# test_tasks.py tests enable_ssml, which does not change texts without entities.
SYNTHESIZED: Json = {
    **fields(
        "voice: ryan, format: wav, sample_rate: 8000, rate: 2.0, pitch: 1.5, volume: 80, seed: 5, type: 1, "
        "instruction: Softly., language_hints: [de], language_type: de, word_timestamp_enabled: true, "
        "hot_fix: {replace: []}"
    ),
    "bit_rate": Sent(64, {"format": "opus"}),
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
        ends_with={"closed": 1000},
        style=("instructions",),
        wrappers=("session",),
    ),
    "DashScope, SpeechSynthesizer": Documented(
        SYNTHESIZER,
        [{"model": "qwen3-tts", "input": {"text": "Hello."}}],
        [Place(SYNTHESIZED, inside="input")],
        style=("instruction",),
        language="language_type",
    ),
    "DashScope, tasks": Documented(
        "/api-ws/v1/inference",
        [task("run-task"), task("continue-task", input={"text": "Hello."}), task("finish-task", input={})],
        [Place({"model": "cosyvoice-v3"}, inside="payload"), Place(SYNTHESIZED, inside="payload.parameters")],
        ends_with={"type": "task-finished"},
        style=("instruction",),
        wrappers=("payload",),
    ),
}
ROWS = Rows(SOCKETS, POSTS, DOCUMENTED)
