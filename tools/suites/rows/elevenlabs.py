"""ElevenLabs: speech, dialogues, their sockets, and dictionaries."""

from serve_app.extension import Sample
from tools.suites.documented import Documented, Json, Place, Sent, fields
from tools.suites.row import Closing, End, Owned, PostRow, Rows, SocketRow, Stop, WordTimesForm, context, samples_of

SAMPLES = samples_of("elevenlabs")
DIALOGUE = context(inputs=[{"text": "$text ", "voice_id": "$voice"}])
SOCKETS = {
    "elevenlabs": SocketRow(
        SAMPLES["ElevenLabs"],
        ends_with={"isFinal": True},
        failure_type=None,
        invalid=[
            (context(text=5), "text must be a string"),
            ({"text": "x", "context_id": 5}, "context_id must be a string"),
        ],
        invalid_reply={"contextId": None},
        numbers=['{"text": "a", "voice_settings": {"speed": ?}}'],
        more=[context(text="$text", voice_settings={"speed": 1.1}, flush=True), {"close_socket": True}],
        split_utterance=[context(text="$text"), *SAMPLES["ElevenLabs"].messages[2:]],
        stop=Stop(context(close_context=True), {"isFinal": True}),
        closing=Closing(full=None, failed=None),
        queries=["output_format=pcm_24000&sync_alignment=true", "output_format=mp3_44100_128"],
        times=WordTimesForm("alignment", counts_from="words"),
        is_continued=False,  # a context is the conversation
    ),
    "elevenlabs-text": SocketRow(
        Sample(
            "/v1/text-to-speech/$voice/stream-input?output_format=pcm_24000",
            ({"text": " ", "voice_settings": None}, {"text": "$text "}, {"text": ""}),
        ),
        ends_with={"isFinal": True},
        failure_type=None,
        invalid=[({"text": 5}, "text must be a string")],
        invalid_reply={"contextId": None},
        queries=["output_format=pcm_16000", "output_format=ulaw_8000"],
        numbers=['{"text": "a", "voice_settings": {"speed": ?}}'],
        more=[context(text="$text", flush=True)],
        split_utterance=[{"text": "$text"}, {"text": ""}],
        closing=Closing(stays_open=False, full=1000, failed=1000),
        times=WordTimesForm("alignment", counts_from="words"),
    ),
    "elevenlabs-dialogue": SocketRow(
        Sample(
            "/v1/text-to-dialogue/multi-stream-input?output_format=pcm_24000",
            (
                context(voices=["$voice"]),
                DIALOGUE,
                context(inputs=[{"text": "", "voice_id": "$voice"}], flush=True),
                context(close_context=True),
            ),
        ),
        ends_with={"is_final": True},
        failure_type=None,
        invalid=[
            ({**DIALOGUE, "context_id": 5}, "context_id must be a string"),
            (context(inputs=[{"text": 5}]), "inputs must be a list"),
        ],
        invalid_reply={"context_id": None},
        numbers=['{"inputs": [{"text": "a"}], "voice_settings": {"speed": ?}}'],
        more=[{**DIALOGUE, "flush": True}],
        stop=Stop(context(close_context=True), {"is_final": True}),
        closing=Closing(full=None, failed=None),
        times=WordTimesForm("alignment", counts_from="audio"),
        is_continued=False,
    ),
}


def post(base: str, way: str, body: Json) -> PostRow:
    return PostRow(
        Sample(base + way, body=body),
        name="" if way or "dialogue" in base else "ElevenLabs",
        numbers=[('{"text": "x", "voice_settings": {"speed": ?}}', "speed")],
        query_numbers=[("output_format=mp3_44100_", "output_format"), ("output_format=pcm_", "output_format")],
        wrong=[({"language_code": 5}, "language_code"), ({"voice_settings": {"speed": 9}}, "speed")],
        formats=[("output_format=?", {}, "pcm_24000")],
        whole=("output_format=pcm_24000", {}, ("audio_base64",)) if way == "/with-timestamps" else None,
        end=End("lines") if way == "/stream/with-timestamps" else None,
        more={"voice_settings": {"speed": 1.1}, "language_code": "en", "seed": 5},
        times=WordTimesForm("alignment" if "with-timestamps" in way else ""),
    )


POSTS = {
    base + way: post(base, way, body)
    for base, body in (
        ("/v1/text-to-speech/$voice", {"text": "$text"}),
        ("/v1/text-to-dialogue", {"inputs": [{"text": "$text", "voice_id": "$voice"}]}),
    )
    for way in ("", "/stream", "/with-timestamps", "/stream/with-timestamps")
}
VOICE_SETTINGS: Json = fields("stability: 0.5, similarity_boost: 0.5, style: 0.5, use_speaker_boost: true, speed: 2.0")
QUERY: Json = {"output_format": "pcm_8000", "enable_logging": "false", "optimize_streaming_latency": "1"}
BODY: Json = {
    **fields(
        "text: Bye., model_id: eleven_v3, language_code: de, seed: 5, previous_text: A., next_text: B., "
        "previous_request_ids: [a], pronunciation_dictionary_locators: [{pronunciation_dictionary_id: a}]"
    ),
    "apply_text_normalization": Sent("on", {"text": "3 kg", "language_code": "en"}),
}
# These do not change texts without marks and figures. test_text_fields.py tests enable_ssml_parsing and figures.
OVER_SOCKET: Json = fields(
    "model_id: eleven_v3, language_code: de, enable_logging: 'false', output_format: pcm_8000, "
    "inactivity_timeout: '5', sync_alignment: 'true', auto_mode: 'true', seed: '5'"
)
PLACES = [
    Place(OVER_SOCKET, None),
    Place(
        fields(
            "generation_config: {chunk_length_schedule: [50]}, xi_api_key: key, authorization: key, flush: true, "
            "pronunciation_dictionary_locators: [{pronunciation_dictionary_id: a}], try_trigger_generation: true"
        )
    ),
    Place(VOICE_SETTINGS, inside="voice_settings"),
]
CONTEXT = {"context_id": "one"}
SAID = "Hello there all of you. "  # text for which the tests have readings
DOCUMENTED = {
    "ElevenLabs": Documented(
        "/v1/text-to-speech/serena/stream/with-timestamps",
        [{"text": "Hello."}],
        [Place(QUERY, None), Place(BODY), Place(VOICE_SETTINGS, inside="voice_settings")],
        language="language_code",
    ),
    "ElevenLabs, dialogue": Documented(
        "/v1/text-to-dialogue",
        [{"inputs": [{"text": "Hello.", "voice_id": "serena"}]}],
        [
            Place(QUERY, None),
            Place({name: BODY[name] for name in ("model_id", "language_code", "seed")}),
            Place({"settings": {"stability": 0.5}, "apply_text_normalization": "on"}),
            Place({"voice_id": "ryan", "new_turn": True}, inside="inputs"),
        ],
    ),
    "ElevenLabs, contexts": Documented(
        "/v1/text-to-speech/serena/multi-stream-input",
        [
            {**CONTEXT, "text": SAID},
            {**CONTEXT, "text": SAID, "flush": True},
            {**CONTEXT, "text": "", "flush": True},
            {**CONTEXT, "close_context": True},
        ],
        PLACES,
        ends_with={"isFinal": True},
        language="language_code",
    ),
    "ElevenLabs, one text": Documented(
        "/v1/text-to-speech/serena/stream-input",
        [{"text": SAID}, {"text": SAID, "flush": True}, {"text": ""}],
        PLACES,
        ends_with={"isFinal": True},
    ),
    "ElevenLabs, contexts of a dialogue": Documented(
        "/v1/text-to-dialogue/multi-stream-input",
        [
            {**CONTEXT, "voices": ["serena"]},
            {**CONTEXT, "inputs": [{"text": "Hello. ", "voice_id": "serena"}]},
            {**CONTEXT, "inputs": [], "flush": True},
            {**CONTEXT, "close_context": True},
        ],
        [
            Place(OVER_SOCKET, None),
            Place({"voices": ["ryan"]}),
            Place(VOICE_SETTINGS, inside="voice_settings"),
            Place(VOICE_SETTINGS, 1, "voice_settings"),
            Place({"voice_id": "ryan", "new_turn": True}, 1, "inputs"),
        ],
        ends_with={"is_final": True},
    ),
}
RULE = {"string_to_replace": "SQL", "type": "alias", "alias": "sequel"}
OWNED = {"dictionary_id": Owned("/v1/pronunciation-dictionaries/add-from-rules", {"name": "it", "rules": [RULE]})}
STORING = [
    *("/v1/voices/add", "/v1/voices/{voice_id}/edit"),
    *(f"/v1/text-to-voice{way}" for way in ("", "/design", "/create-previews", "/create-voice-from-preview")),
    *(f"/v1/pronunciation-dictionaries/add-from-{source}" for source in ("rules", "file")),
    *(f"/v1/pronunciation-dictionaries/{{dictionary_id}}/{way}-rules" for way in ("add", "remove")),
]
ROWS = Rows(SOCKETS, POSTS, DOCUMENTED, OWNED, STORING)
