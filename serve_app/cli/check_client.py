"""A running server, tried as clients of other services ask it, and the lines that point these clients to it."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from deployments.errors import TalkrayError

_TEXT = "Hello."
_BOUND_S = 30.0


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one family of clients asks, and the configuration of each client that was tried (docs/clients.md)."""

    name: str
    path: str  # of the WebSocket, or of the POST where there are no messages
    messages: tuple[Mapping[str, object], ...] = ()
    body: Mapping[str, object] | None = None
    protocols: tuple[str, ...] = ()  # that a WebSocket's handshake offers
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What came of asking."""

    dialect: Dialect
    problem: str | None
    first_audio_s: float = 0.0

    def line(self) -> str:
        if self.problem is not None:
            return f"FAILED  {self.dialect.name}: {self.problem}"
        return f"ok      {self.dialect.name}: first audio after {self.first_audio_s * 1000:.0f} ms"


def dialects(url: str, voice: str) -> tuple[Dialect, ...]:
    """Of a server at `url`, spoken to with `voice`."""
    sockets = "ws" + url.removeprefix("http")
    raw = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24000}
    cartesia = {"model_id": "sonic-3", "voice": {"mode": "id", "id": voice}, "output_format": raw}
    return (
        Dialect(
            "OpenAI",
            "/v1/audio/speech",
            body={"model": "tts-1", "input": _TEXT, "voice": voice, "response_format": "pcm"},
            lines=(
                f'openai (Python):  OpenAI(base_url="{url}/v1", api_key=KEY)',
                f'openai (JS):      new OpenAI({{ baseURL: "{url}/v1", apiKey: KEY }})',
                f'Vercel AI SDK:    createOpenAI({{ baseURL: "{url}/v1", apiKey: KEY }}).speech("tts-1")',
                f'LiveKit:          openai.TTS(base_url="{url}/v1", api_key=KEY, voice="{voice}")',
                f'Pipecat:          OpenAITTSService(base_url="{url}/v1", api_key=KEY)',
                f'openai (Azure):   AzureOpenAI(azure_endpoint="{url}", api_version="2025-04-01-preview", api_key=KEY)',
                f'Mistral (JS):     new Mistral({{ serverURL: "{url}", apiKey: KEY }}).audio.speech',
                (
                    f"Open WebUI:       AUDIO_TTS_ENGINE=openai AUDIO_TTS_OPENAI_API_BASE_URL={url}/v1 "
                    f"AUDIO_TTS_OPENAI_API_KEY=KEY AUDIO_TTS_MODEL=tts-1 AUDIO_TTS_VOICE={voice}"
                ),
                f"SillyTavern:      TTS, OpenAI Compatible: Provider Endpoint {url}/v1/audio/speech, voice {voice}",
                (
                    f"LibreChat:        librechat.yaml, speech: {{ tts: {{ openai: {{ url: '{url}/v1/audio/speech', "
                    f"apiKey: 'KEY', model: 'tts-1', voices: ['{voice}'] }} }} }}"
                ),
                f"Home Assistant:   OpenAI TTS (HACS): URL {url}/v1/audio/speech, model tts-1, voice {voice}",
                f"Home Assistant:   talkray wyoming {url}, then Wyoming Protocol with its host and port 10200",
            ),
        ),
        Dialect(
            "OpenAI Realtime",
            "/v1/realtime?model=gpt-realtime",
            messages=({"type": "response.create", "response": {"input": [_message()]}},),
            lines=(
                f'openai (Python):  AsyncOpenAI(websocket_base_url="{sockets}/v1", api_key=KEY).realtime.connect(...)',
            ),
        ),
        Dialect(
            "Deepgram",
            f"/v1/speak?model={voice}&encoding=linear16&sample_rate=24000",
            messages=({"type": "Speak", "text": _TEXT}, {"type": "Flush"}),
            lines=(
                f'LiveKit:          deepgram.TTS(base_url="{url}/v1/speak", api_key=KEY, model="{voice}")',
                (
                    f'Pipecat:          DeepgramTTSService(base_url="{sockets}", api_key=KEY, '
                    f'settings=DeepgramTTSService.Settings(voice="{voice}"))'
                ),
                (
                    f'deepgram-sdk:     DeepgramClientEnvironment(base="{url}", production="{sockets}", '
                    f'agent="{sockets}", agent_rest="{url}")'
                ),
            ),
        ),
        Dialect(
            "Deepgram Flux",
            f"/v2/speak?model=flux-{voice}-en&encoding=linear16&sample_rate=24000",
            messages=({"type": "Speak", "text": _TEXT}, {"type": "Flush"}),
            lines=(
                f'LiveKit:          deepgram.TTSv2(base_url="{url}/v2/speak", api_key=KEY, model="flux-{voice}-en")',
                (
                    f'Pipecat:          DeepgramFluxTTSService(url="{sockets}/v2/speak", api_key=KEY, '
                    f'settings=DeepgramFluxTTSService.Settings(voice="flux-{voice}-en"))'
                ),
            ),
        ),
        Dialect(
            "ElevenLabs",
            f"/v1/text-to-speech/{voice}/multi-stream-input?output_format=pcm_24000",
            messages=(
                {"text": " ", "context_id": "check"},
                {"text": f"{_TEXT} ", "context_id": "check", "flush": True},
                {"text": "", "context_id": "check", "flush": True},
                {"context_id": "check", "close_context": True},
            ),
            lines=(
                f'LiveKit:          elevenlabs.TTS(base_url="{url}/v1", api_key=KEY, voice_id="{voice}")',
                (
                    f'Pipecat:          ElevenLabsTTSService(url="{sockets}", api_key=KEY, '
                    f'settings=ElevenLabsTTSService.Settings(voice="{voice}"))'
                ),
                f'elevenlabs:       ElevenLabs(base_url="{url}", api_key=KEY)',
            ),
        ),
        Dialect(
            "Cartesia",
            "/tts/websocket",
            messages=({**cartesia, "context_id": "check", "transcript": _TEXT, "continue": False},),
            lines=(
                f'LiveKit:          cartesia.TTS(base_url="{url}", api_key=KEY, voice="{voice}")',
                (
                    f'Pipecat:          CartesiaTTSService(url="{sockets}/tts/websocket", api_key=KEY, '
                    f'settings=CartesiaTTSService.Settings(voice="{voice}"))'
                ),
                f'cartesia:         Cartesia(base_url="{url}", websocket_base_url="{sockets}", api_key=KEY)',
            ),
        ),
        Dialect(
            "DashScope",
            "/api-ws/v1/realtime?model=qwen3-tts-flash-realtime",
            messages=(
                {"type": "session.update", "session": {"voice": voice, "mode": "server_commit"}},
                {"type": "input_text_buffer.append", "text": _TEXT},
                {"type": "session.finish"},
            ),
            lines=(
                f'dashscope:        QwenTtsRealtime(model=..., callback=..., url="{sockets}/api-ws/v1/realtime")',
                f'dashscope (HTTP): dashscope.base_http_api_url = "{url}/api/v1"',
            ),
        ),
        Dialect(
            "vLLM-Omni",
            "/v1/audio/speech/stream",
            messages=(
                {"type": "session.config", "voice": voice, "response_format": "pcm"},
                {"type": "input.text", "text": _TEXT},
                {"type": "input.done"},
            ),
            lines=(f"vLLM-Omni:        {sockets}/v1/audio/speech/stream, {url}/v1/audio/speech/batch",),
        ),
        Dialect(
            "nari",
            "/v1/audio/speech/ws",
            protocols=("nari.speech.v1",),
            messages=(
                {"type": "request.start", "voice": voice},
                {"type": "input_text.append", "sequence": 0, "text": _TEXT},
                {"type": "input_text.end", "sequence": 1},
            ),
            lines=(f"nari:             {sockets}/v1/audio/speech/ws with the subprotocol nari.speech.v1",),
        ),
        Dialect(
            "VoxServe",
            "/generate",
            body={"text": _TEXT, "speaker": voice},
            lines=(f"VoxServe:         {url}/generate",),
        ),
        Dialect(
            "Kokoro-FastAPI",
            "/dev/captioned_speech",
            body={"input": _TEXT, "voice": voice},
            lines=(f"Kokoro-FastAPI:   {url}/dev/captioned_speech, {url}/v1",),
        ),
    )


def _message() -> Mapping[str, object]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": _TEXT}]}


async def check(url: str, *, key: str | None) -> AsyncIterator[CheckResult]:
    """Every dialect, one after the other. Raises TalkrayError where there is no server."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=_BOUND_S)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as http:
        try:
            async with http.get("/v1/audio/voices") as answer:
                voices = (await answer.json())["voices"]
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            raise TalkrayError(f"no server of Talkray answers at {url}: {error or type(error).__name__}") from None
        for dialect in dialects(url, voices[0]["id"] if voices else "default"):
            yield await _try(http, dialect)


async def _try(http: aiohttp.ClientSession, dialect: Dialect) -> CheckResult:
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(_BOUND_S):
            problem = await (_post(http, dialect) if dialect.body is not None else _converse(http, dialect))
    except (aiohttp.ClientError, TimeoutError) as error:
        return CheckResult(dialect, f"{error or type(error).__name__}")
    return CheckResult(dialect, problem, time.perf_counter() - began_s)


async def _post(http: aiohttp.ClientSession, dialect: Dialect) -> str | None:
    """What is wrong, once there is audio or none can come."""
    async with http.post(dialect.path, json=dialect.body) as answer:
        if answer.status != 200:
            return f"{answer.status}: {await answer.text()}"
        return None if await answer.content.readany() else "no audio came"


async def _converse(http: aiohttp.ClientSession, dialect: Dialect) -> str | None:
    async with http.ws_connect(dialect.path, protocols=dialect.protocols) as socket:
        for message in dialect.messages:
            await socket.send_json(message)
        async for received in socket:
            if received.type is aiohttp.WSMsgType.BINARY:
                return None
            fields: dict[str, Any] = received.json()
            audio = fields.get("audio") or fields.get("delta")
            if (audio and isinstance(audio, str)) or fields.get("type") == "chunk":  # nari says its format there
                return None
            if fields.get("error") or fields.get("type") in ("error", "Error"):
                return str(received.data)
        return f"closed with {socket.close_code} before any audio"
