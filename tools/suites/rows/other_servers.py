"""vLLM-Omni, VoxServe, Kokoro-FastAPI, nari and Mistral."""

from serve_app.extension import Sample
from tools.suites.documented import Documented, Json, Place, fields, messages
from tools.suites.row import VOICE, Closing, End, PostRow, Rows, SocketRow, Stop, WordTimesForm, by_path, samples_of
from tools.suites.rows.core import OPENAI_SPEECH, QWEN, SPOKEN

SAMPLES = samples_of("other_servers")
SOCKETS = {
    "vllm-omni": SocketRow(
        SAMPLES["vLLM-Omni"],
        ends_with={"type": "session.done"},
        invalid=[
            ({"type": "input.text", "text": "x"}, "must be session.config"),
            ({"type": "input.done"}, "must be session.config"),
            ({"type": "input.text"}, "text is required"),
            ({"type": "session.config", "voice": "nobody"}, "Unknown voice 'nobody'"),
            ({"type": "x"}, "type must be session.config"),
            ({"speed": 1}, "type must be session.config"),
        ],
        invalid_reply={"type": "error", "action": "discard", "partial_audio": False},
        closing=Closing(drain={"type": "session.close"}),
        numbers=['{"type": "session.config", "voice": "ryan", "seed": ?}'],
        more=[{"type": "session.config", "voice": "ryan", "speed": 1.1, "seed": 5}, {"type": "session.close"}],
        is_strict=True,
        next_utterance=SAMPLES["vLLM-Omni"].messages[1:],
        split_utterance=SAMPLES["vLLM-Omni"].messages,
    ),
    "nari": SocketRow(
        SAMPLES["nari"],
        ends_with={"type": "response.done", "stop_reason": "stop"},
        invalid=[
            ({"type": "input_text.append", "text": "Hello", "sequence": 0}, "type"),
            ({"type": "request.start", "voice": "nobody"}, "voice"),
            ({"type": "request.start", "voice": "ryan", "speed": 9}, "speed"),
            ({"type": "nonsense"}, "type"),
        ],
        numbers=['{"type": "request.start", "voice": "ryan", "top_k": ?}'],
        more=[
            {"type": "request.start", "voice": "ryan", "language": "auto", "instruct": "Softly.", "top_k": 50},
            {"type": "input_text.append", "text": "$text"},
            {"type": "response.cancel"},
        ],
        stop=Stop({"type": "response.cancel"}, {"type": "response.done", "stop_reason": "cancelled"}),
        closing=Closing(stays_open=False),
        is_strict=True,
        split_utterance=[
            SAMPLES["nari"].messages[0],
            {"type": "input_text.append", "text": "$text"},
            {"type": "input_text.end"},
        ],
    ),
}

MISTRAL_ROW = PostRow(
    Sample("/v1/audio/speech", body={"input": "$text", "voice_id": "$voice"}),
    "input",
    "Mistral",
    formats=[("", {"response_format": "?"}, "wav")],
    whole=("", {"response_format": "pcm"}, ("audio_data",)),
    end=End("events", {"stream": True}),
)
POSTS = {"Mistral": MISTRAL_ROW} | by_path(
    PostRow(
        Sample("/v1/audio/speech/batch", body={"voice": "$voice", "items": 2 * [{"input": "$text"}]}),
        "items",
        "vLLM-Omni",
        [('{"items": [{"input": "x", "overrides": {"top_k": ?}}]}', "top_k")],
        formats=[("", {"items": [{"input": "Hello.", "response_format": "?"}]}, "wav")],
        has_results=True,
        more={"items": [{"input": "$text", "overrides": {"speed": 1.1}}]},
    ),
    PostRow(
        SAMPLES["VoxServe"],
        "text",
        "VoxServe",
        [('{"text": "x", "audio": ?}', "audio")],
        wrong=[({"instruct": 7}, "instruct"), ({"audio": 7}, "audio")],
        more={"streaming": "true", "x_vector_only_mode": False, "speaker": VOICE},
    ),
    PostRow(
        SAMPLES["Kokoro-FastAPI"],
        "input",
        "Kokoro-FastAPI",
        formats=[("", {"response_format": "?"}, "flac")],
        whole=("", {"response_format": "pcm", "stream": False}, ("audio",)),
        end=End("lines"),
        more={"stream": False, "speed": 1.1},
        times=WordTimesForm("timestamps"),
    ),
)
MISTRAL: Json = fields(
    "model: voxtral, voice_id: ryan, ref_audio: AAAA, response_format: pcm, "
    "stream: true, prompt_cache_key: a, metadata: {a: 1}"
)
KOKORO: Json = OPENAI_SPEECH | fields("word_timestamps: false, return_timestamps: false, return_timing: false")
OMNI_SOCKET: Json = QWEN | fields(
    "model: other, voice: ryan, speaker: ryan, response_format: pcm, speed: 2.0, speaker_embedding: [0.5], "
    "stream_audio: false, word_timestamps: true, split_granularity: clause, initial_codec_chunk_frames: 1"
)
NARI: Json = QWEN | fields(
    "model: other, voice: ryan, response_format: wav, stream: false, speed: 2.0, request_id: mine, "
    "skip_fixed_bootstrap_audio: false, stream_chunk_schedule: [1], stream_first_chunk_frames: 1, "
    "stream_steady_chunk_frames: 1, stream_chunk_frames: 1"
)
VOX_SERVE: Json = fields(
    "text: Bye., audio: AAAA, streaming: false, language: german, speaker: ryan, "
    "ref_text: Hi., instruct: Softly., x_vector_only_mode: true"
)
DOCUMENTED = {
    "Mistral": Documented("/v1/audio/speech", [{"input": "Hello.", "voice_id": "serena"}], [Place(MISTRAL)]),
    "Kokoro-FastAPI": Documented("/dev/captioned_speech", [{**SPOKEN, "response_format": "pcm"}], [Place(KOKORO)]),
    "vLLM-Omni, batch": Documented(
        "/v1/audio/speech/batch", [{**SPOKEN, "items": [{"input": "Hello."}]}], [Place({**QWEN, "stream": True})]
    ),
    "vLLM-Omni, WebSocket": Documented(
        "/v1/audio/speech/stream",
        messages("type: session.config, voice: alloy", "type: input.text, text: Hello.", "type: input.done"),
        [Place(OMNI_SOCKET)],
        ends_with={"type": "session.done"},
        style=("instruct",),
    ),
    "nari": Documented(
        "/v1/audio/speech/ws",
        messages("type: request.start, voice: alloy", "type: input_text.append, text: Hello.", "type: input_text.end"),
        [Place(NARI)],
        protocols=["nari.speech.v1"],
        is_strict=True,
        ends_with={"closed": 1000},
        style=("instruct",),
        language="language",
    ),
    "VoxServe": Documented(
        "/generate", [{"text": "Hello."}], [Place(VOX_SERVE)], style=("instruct",), language="language"
    ),
}
ROWS = Rows(SOCKETS, POSTS, DOCUMENTED)
