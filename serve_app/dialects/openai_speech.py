"""OpenAI's `POST /v1/audio/speech`, also Azure's, and with the fields of servers that follow it."""

import re
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.embedded_voice.english import unspoken
from deployments.protocol import ModelInfo
from serve_app.api.bodies.client_input import read_object
from serve_app.api.requests import ignored_fields
from serve_app.api.requests.build_utterance import segments_of
from serve_app.api.requests.make_request import strict_request
from serve_app.api.requests.speech_body import SpeechBody
from serve_app.api.requests.speech_request import CONTENT_TYPES, EVENT_STREAM
from serve_app.api.responses.respond import respond
from serve_app.api.speech_service import SpeechService
from serve_app.dialects.dialect import Dialect, JsonRoute, Route, Sample
from serve_app.text.spoken_text import LEFT_OUT, SpokenText


async def speak(service: SpeechService, request: Request, fields: Mapping[str, object]) -> Response:
    """Speaks `input`, streaming unless `stream` is false."""
    return await respond(service, request, await strict_request(service.offer, fields, accept=_accept(request)))


async def speak_deployment(service: SpeechService, request: Request, deployment: str) -> Response:
    """The same for Azure's clients, whose deployments have names of their own."""
    fields = await service.read_fields(request)
    reasons = {"model": "a deployment of any name is the loaded model"} if "model" in fields else {}
    speech = await strict_request(
        service.offer, fields, accept=_accept(request), overrides={"model": None}, reasons=reasons
    )
    return await respond(service, request, speech)


def _accept(request: Request) -> str:
    return ", ".join(request.headers.getlist("accept"))


async def show_text(service: SpeechService, request: Request) -> Response:
    """Takes the fields of `/v1/audio/speech`, and answers what would be spoken, what would not, and in which parts."""
    fields = await read_object(request)
    speech = await strict_request(service.offer, fields)
    spoken = speech.spoken
    answer = {
        "object": "audio.text",
        "model": speech.info.name,
        "markup": spoken.rules.markup,
        "sent": spoken.sent,
        "spoken": spoken.text,
        "left_out": [{"what": kind, "count": count} for kind, count in spoken.left_out.items()],
        "segments": [{"text": part.text, "pause_s": part.pause_s, "speed": part.speed} for part in segments_of(speech)],
        "changed": [
            {"written": piece.written.replace(LEFT_OUT, "").strip(), "spoken": piece.spoken.strip()}
            for piece in spoken.pieces()
            if piece.spoken.strip() and piece.spoken.split() != piece.written.replace(LEFT_OUT, "").split()
        ],
        "unspoken": _unspoken(spoken, speech.info),
        "ignored": ignored_fields.entries(speech.ignored),
    }
    return JSONResponse(answer, headers=ignored_fields.as_header(speech.ignored))


def _unspoken(spoken: SpokenText, info: ModelInfo) -> list[tuple[int, int]]:
    """Start and end, in code points of `sent`, of each run that is not read aloud."""

    def mark(run: re.Match[str]) -> str:
        word = run[0]
        return LEFT_OUT * len(word) if unspoken(word) == len(word) else word

    pieces = spoken.pieces()
    sent = "".join(each.written if each.spoken.strip() else re.sub(r"\S", LEFT_OUT, each.written) for each in pieces)
    marked = sent if info.spoken_form is None else re.sub(r"[^\W\d_]+", mark, sent)
    return [run.span() for run in re.finditer(f"{LEFT_OUT}+", marked)]


# The page at `/docs` sends the example as it is; all fields at once would be refused.
_EXAMPLE = {"model": "qwen3-tts", "input": "Hello from Talkray.", "voice": "alloy", "response_format": "mp3"}
_ERROR = {"message": "what was wrong", "type": "invalid_request_error", "param": "input", "code": "invalid_value"}
_SPEECH_DOCS = {
    "operationId": "speech_v1_audio_speech_post",  # names of methods in generated clients
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": SpeechBody.model_json_schema(), "example": _EXAMPLE}},
    },
    "responses": {
        "200": {
            "description": "Audio in the format that was asked for, or events that carry it.",
            "content": {
                **{kind: {"schema": {"type": "string", "format": "binary"}} for kind in CONTENT_TYPES.values()},
                EVENT_STREAM: {"schema": {"type": "string"}},
            },
        },
        "default": {
            "description": "OpenAI's envelope; 429 and 503 say when to come again.",
            "content": {"application/json": {"example": {"error": _ERROR}}},
        },
    },
}
_TEXT_DOCS = {"requestBody": _SPEECH_DOCS["requestBody"]}
_SAMPLE = Sample(
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
DIALECT = Dialect(
    "OpenAI",
    routes=(
        JsonRoute("POST /v1/audio/speech", speak, "Speak a text", docs=_SPEECH_DOCS),
        Route("POST /v1/audio/text", show_text, "Show what of a text is spoken", docs=_TEXT_DOCS),
        JsonRoute("POST /openai/v1/audio/speech", speak),
        Route("POST /openai/deployments/{deployment}/audio/speech", speak_deployment, "Speak a text (Azure)"),
    ),
    heading="Speech",
    sample=_SAMPLE,
)
