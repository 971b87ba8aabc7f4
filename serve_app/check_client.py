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
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of asking."""

    dialect: Dialect
    problem: str | None
    first_audio_s: float = 0.0

    def line(self) -> str:
        """For people."""
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
    )


async def check(url: str, *, key: str | None) -> AsyncIterator[Tried]:
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


async def _try(http: aiohttp.ClientSession, dialect: Dialect) -> Tried:
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(_BOUND_S):
            problem = await (_post(http, dialect) if dialect.body is not None else _converse(http, dialect))
    except (aiohttp.ClientError, TimeoutError) as error:
        return Tried(dialect, f"{error or type(error).__name__}")
    return Tried(dialect, problem, time.perf_counter() - began_s)


async def _post(http: aiohttp.ClientSession, dialect: Dialect) -> str | None:
    """What is wrong, once there is audio or none can come."""
    async with http.post(dialect.path, json=dialect.body) as answer:
        if answer.status != 200:
            return f"{answer.status}: {await answer.text()}"
        return None if await answer.content.readany() else "no audio came"


async def _converse(http: aiohttp.ClientSession, dialect: Dialect) -> str | None:
    async with http.ws_connect(dialect.path) as socket:
        for message in dialect.messages:
            await socket.send_json(message)
        async for received in socket:
            if received.type is aiohttp.WSMsgType.BINARY:
                return None
            fields: dict[str, Any] = received.json()
            if fields.get("audio") or fields.get("type") == "chunk":
                return None
            if fields.get("error") or fields.get("type") in ("error", "Error"):
                return str(received.data)
        return f"closed with {socket.close_code} before any audio"
