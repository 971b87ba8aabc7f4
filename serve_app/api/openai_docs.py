"""OpenAPI description of `POST /v1/audio/speech`, and configuration for its clients."""

from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.resolve.speech_request import CONTENT_TYPES, EVENT_STREAM
from serve_app.extension import Sample

# The page at `/docs` sends this example unchanged. A body with all fields would be rejected.
_EXAMPLE = {"model": "qwen3-tts", "input": "Hello from Talkray.", "voice": "alloy", "response_format": "mp3"}
_ERROR = {"message": "the problem", "type": "invalid_request_error", "param": "input", "code": "invalid_value"}
_DOCS = {
    "operationId": "speech_v1_audio_speech_post",  # sets method names in generated clients
    "responses": {
        "200": {
            "description": "Audio in the requested format, or events with encoded audio.",
            "content": {
                **{kind: {"schema": {"type": "string", "format": "binary"}} for kind in CONTENT_TYPES.values()},
                EVENT_STREAM: {"schema": {"type": "string"}},
            },
        },
        "default": {
            "description": "OpenAI's error object. Retry a 429 or 503 after the time in Retry-After.",
            "content": {"application/json": {"example": {"error": _ERROR}}},
        },
    },
}


def request_docs(body: type[SpeechBody]) -> dict[str, object]:
    """Return the OpenAPI description of a request with this body."""
    content = {"application/json": {"schema": body.model_json_schema(), "example": _EXAMPLE}}
    return {"requestBody": {"required": True, "content": content}}


def speech_docs(body: type[SpeechBody]) -> dict[str, object]:
    return {**request_docs(body), **_DOCS}


SAMPLE = Sample(
    "/v1/audio/speech",
    body={"model": "tts-1", "input": "$text", "voice": "$voice", "response_format": "pcm"},
    clients=(
        'openai (Python):  OpenAI(base_url="$url/v1", api_key=KEY)',
        'openai (JS):      new OpenAI({ baseURL: "$url/v1", apiKey: KEY })',
        'Vercel AI SDK:    createOpenAI({ baseURL: "$url/v1", apiKey: KEY }).speech("tts-1")',
        'LiveKit:          openai.TTS(base_url="$url/v1", api_key=KEY, voice="$voice")',
        'Pipecat:          OpenAITTSService(base_url="$url/v1", api_key=KEY)',
        'openai (Azure):   AzureOpenAI(azure_endpoint="$url", api_version="2025-04-01-preview", api_key=KEY)',
        'Mistral (JS):     new Mistral({ serverURL: "$url", apiKey: KEY }).audio.speech',
        (
            "Open WebUI:       AUDIO_TTS_ENGINE=openai AUDIO_TTS_OPENAI_API_BASE_URL=$url/v1 "
            "AUDIO_TTS_OPENAI_API_KEY=KEY AUDIO_TTS_MODEL=tts-1 AUDIO_TTS_VOICE=$voice"
        ),
        "SillyTavern:      TTS, OpenAI Compatible: Provider Endpoint $url/v1/audio/speech, voice $voice",
        (
            "LibreChat:        librechat.yaml, speech: { tts: { openai: { url: '$url/v1/audio/speech', "
            "apiKey: 'KEY', model: 'tts-1', voices: ['$voice'] } } }"
        ),
        "Home Assistant:   OpenAI TTS (HACS): URL $url/v1/audio/speech, model tts-1, voice $voice",
        "Home Assistant:   talkray wyoming $url, then Wyoming Protocol with its host and port 10200",
    ),
)
