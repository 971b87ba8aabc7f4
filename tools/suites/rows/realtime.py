"""OpenAI's Realtime socket."""

from serve_app.extension import Sample
from tools.suites.documented import Documented, Json, Place, fields
from tools.suites.row import Closing, Rows, SocketRow, Stop, response, samples_of, update

ASKED = samples_of("realtime")["OpenAI Realtime"]
SAMPLE = Sample(ASKED.path, (update(type="realtime", audio={"output": {"voice": "$voice"}}), *ASKED.messages))


def item(text: str = "$text") -> Json:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


ASH = {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "ash", "speed": 1.1}
SOCKETS = {
    "realtime": SocketRow(
        SAMPLE,
        ends_with=response("completed"),
        invalid=[
            ({"type": "input_audio_buffer.append", "audio": ""}, "type"),
            ({"type": "session.update"}, "session"),
            (update(output_audio_format="mp3"), "format"),
            ({"type": "response.create", "response": {"input": "Hello"}}, "response.input"),
            ({"type": "response.create", "response": {"input": [{"content": "Hello"}]}}, "response.input"),
            ({"type": "conversation.item.create", "item": []}, "item"),
            ({"type": "response.cancel"}, "type"),
        ],
        numbers=['{"type": "session.update", "session": {"speed": ?}}'],
        more=[
            {**update(output_audio_format="g711_ulaw", audio={"output": ASH}), "event_id": "mine"},
            {"type": "conversation.item.create", "item": item()},
            {"type": "response.create", "response": {"input": [item()], "audio": {"output": {"voice": {"id": "ash"}}}}},
            {"type": "response.create"},
            {"type": "response.cancel"},
        ],
        stop=Stop({"type": "response.cancel"}, response("cancelled")),
        closing=Closing(full=None, failed=None),
        unspeakable=response("failed"),
        busy="conversation_already_has_active_response",
        aliases=["/openai/v1/realtime", "/openai/realtime"],
    ),
}

FIELDS: Json = fields(
    "instructions: Be kind., output_modalities: [text], modalities: [text], voice: ryan, "
    "output_audio_format: g711_ulaw, input_audio_format: pcm16, input_audio_transcription: {}, "
    "turn_detection: {type: server_vad}, tools: [], tool_choice: auto, temperature: 0.8, "
    "max_output_tokens: 5, prompt: {id: a}, tracing: auto, truncation: auto, metadata: {a: b}"
)
HELLO = item("Hello.")
DOCUMENTED = {
    "Realtime": Documented(
        "/v1/realtime",
        [
            {"type": "session.update", "session": {}},
            {"type": "conversation.item.create", "item": HELLO},
            {"type": "response.create", "response": {}},
        ],
        [
            Place({"model": "gpt-realtime"}, None),
            Place({**FIELDS, "model": "gpt-realtime"}, inside="session"),
            Place({"voice": "ryan", "speed": 1.5}, inside="session.audio.output"),
            Place({"type": "audio/pcmu", "rate": 48000}, inside="session.audio.output.format"),
            Place({"input": {"turn_detection": {"type": "server_vad"}}}, inside="session.audio"),
            Place({"previous_item_id": "a"}, 1),
            Place({"content": [{"type": "input_audio", "audio": ""}, HELLO["content"][0]]}, 1, "item"),
            Place(FIELDS, 2, "response"),
            Place({"input": [item("Bye.")]}, 2, "response"),
        ],
        ends_with={"type": "response.done"},
        wrappers=("session", "response"),
    ),
}
ROWS = Rows(SOCKETS, documented=DOCUMENTED)
