"""OpenAI's speech route, and fields shared by other strict routes."""

from deployments.protocol import SAMPLING_DEFAULTS
from serve_app.api.openai import SPEECH_DIALECT
from serve_app.extension import Sample
from tools.suites.documented import Documented, Json, Place, Sent, fields
from tools.suites.row import VOICE, End, PostRow, Rows, WordTimesForm, by_path

SAMPLING: Json = {
    name: not value if value is True else type(value)(value / 2) for name, value in SAMPLING_DEFAULTS.items()
}
QWEN: Json = SAMPLING | fields(
    "instructions: Softly., instruct: Softly., language: German, seed: 5, task_type: Base, "
    "ref_audio: AAAA, ref_text: Hi., x_vector_only_mode: true, non_streaming_mode: true"
)
OPENAI: Json = fields(
    "model: other, input: Bye., voice: ryan, instructions: Softly., response_format: wav, "
    "speed: 2.0, stream_format: sse"
)
OPENAI_SPEECH: Json = {
    **OPENAI,
    **QWEN,
    **fields(
        "text: Bye., speaker: ryan, sample_rate: 8000, stream: false, ignore_eos: true, "
        "leading_silence: true, instruction: Softly., lang_code: z, speaker_embedding: [0.5], "
        "initial_codec_chunk_frames: 1, extra_params: {x: 1}, references: [], volume_multiplier: 2, "
        "download_format: mp3, return_download_link: true, allow_voice_tags: true, voice_aliases: {}"
    ),
    "any_language": Sent(True, {"language": "fr"}),
    "word_timestamps": Sent(True, {"stream_format": "sse"}),
    "normalization_options": Sent({"normalize": True}, {"input": "3 kg", "language": "english"}),
    "text_normalization": Sent("on", {"input": "3 kg", "language": "english"}),
    "ssml": Sent(True, {"input": "*a*"}),
    "markup": Sent("none", {"input": "*a*"}),
    "lexicon": Sent({"a": "b"}, {"input": "a"}),
    "max_segment_chars": Sent(50, {"input": "A sentence that is thirty long. " * 2}),
}
SPOKEN = {"input": "Hello.", "voice": "alloy"}

assert SPEECH_DIALECT.sample is not None
TIMES = WordTimesForm("words", asked_by={"word_timestamps": True, "stream_format": "sse"})
SPEECH: Json = {"input": "$text", "voice": "$voice"}
POSTS = by_path(
    PostRow(
        SPEECH_DIALECT.sample,
        "input",
        "OpenAI",
        [
            ('{"input": "x", "voice": "ryan", "speed": ?}', "speed"),
            ('{"input": "x", "voice": "ryan", "unknown": [{"a": ?}]}', "unknown.a"),
        ],
        formats=[("", {"response_format": "?"}, "wav")],
        end=End("events", {"stream_format": "sse"}),
        more={"voice_id": VOICE, "response_format": "pcm", "stream": True},
        times=TIMES,
    ),
    PostRow(Sample("/openai/v1/audio/speech", body=SPEECH), "input", times=TIMES),
    PostRow(
        Sample("/openai/deployments/any/audio/speech", body=SPEECH),
        "input",
        more={"model": "tts-1-hd-zh", "lang_code": "a"},
        times=TIMES,
    ),
)
DOCUMENTED = {
    "OpenAI": Documented(
        "/v1/audio/speech",
        [SPOKEN],
        [Place(OPENAI_SPEECH)],
        style=("instructions", "instruct", "instruction"),
        language="language",
        is_strict=True,
    ),
    "Azure": Documented("/openai/deployments/any/audio/speech", [SPOKEN], [Place(OPENAI)]),
}
ROWS = Rows(posts=POSTS, documented=DOCUMENTED)
