"""`talkray wyoming`: serve Home Assistant's Wyoming protocol with speech from a running server."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlencode

import aiohttp
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.error import Error
from wyoming.event import Event, Eventable, async_read_event
from wyoming.info import Attribution, Describe, Info, TtsProgram, TtsVoice
from wyoming.ping import Ping, Pong
from wyoming.server import AsyncEventHandler, AsyncTcpServer
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart, SynthesizeStop, SynthesizeStopped

from deployments.errors import TalkrayError
from serve_app.text.languages import language_code

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Eventable)

_RATE, _WIDTH, _CHANNELS = 24000, 2, 1
_OURS = Attribution(name="Talkray", url="https://github.com/QwenLM/Qwen3-TTS")


async def serve(url: str, *, host: str, port: int, key: str | None) -> None:
    """Serve Wyoming clients on `host` and `port` with speech from the server at `url`, until cancelled.

    Raises `TalkrayError` if no Talkray server responds at `url`.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(url, headers=headers) as http:
        await describe(http)
        await AsyncTcpServer(host, port).run(lambda reader, writer: _Handler(reader, writer, http))


async def describe(http: aiohttp.ClientSession) -> Info:
    """Return the server's description for Home Assistant, including its voices. Raises `TalkrayError`."""
    try:
        async with http.get("/v1/audio/voices") as answer:
            listed = await answer.json()
        codes = [code for name in listed["languages"] if (code := language_code(name))]
        voices = [_voice(voice, codes or ["en"]) for voice in listed["voices"]]
    except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
        raise TalkrayError(f"listing the server's voices failed: {error or type(error).__name__}") from error
    program = TtsProgram(
        name="talkray",
        attribution=_OURS,
        installed=True,
        description="Qwen3-TTS on Ray Serve",
        version=None,
        voices=voices,
        supports_synthesize_streaming=True,
    )
    return Info(tts=[program])


def _voice(voice: Mapping[str, str], codes: list[str]) -> TtsVoice:
    own = language_code(voice["language"])
    languages = [own, *(code for code in codes if code != own)] if own else codes
    described = voice["description"] or voice["name"]
    return TtsVoice(voice["id"], _OURS, installed=True, description=described, version=None, languages=languages)


class _Handler(AsyncEventHandler):
    """Connection to one client. A `synthesize` event between start and stop repeats the full text and is ignored."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, http: aiohttp.ClientSession) -> None:
        super().__init__(reader, writer)
        self._http = http
        self._text: asyncio.Queue[str | None] | None = None  # pieces of a streamed text; None ends the text
        self._speaking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Handle events until the client disconnects or sends an invalid event."""
        try:
            while (event := await _next_event(self.reader)) is not None and await self.handle_event(event):
                pass
        finally:
            await self.disconnect()
            self.writer.close()

    async def handle_event(self, event: Event) -> bool:
        """Handle one event. Return False to end the connection, for example if the client disconnected early."""
        try:
            try:
                await self._obey(event)
            except TalkrayError as error:
                await self._fail(str(error))
        except ConnectionError:
            await self.disconnect()
            return False
        return True

    async def _obey(self, event: Event) -> None:
        if Describe.is_type(event.type):
            await self.write_event((await describe(self._http)).event())
        elif Ping.is_type(event.type):
            await self.write_event(Pong(text=_string("text", _parsed(Ping, event).text)).event())
        elif SynthesizeStart.is_type(event.type):
            await self.disconnect()
            self._begin(_parsed(SynthesizeStart, event).voice)
        elif SynthesizeChunk.is_type(event.type) and self._text is not None:
            self._text.put_nowait(_string("text", _parsed(SynthesizeChunk, event).text) or "")
        elif SynthesizeStop.is_type(event.type):
            await self._finish()
            await self.write_event(SynthesizeStopped().event())
        elif Synthesize.is_type(event.type) and self._text is None:
            asked = _parsed(Synthesize, event)
            text = _string("text", asked.text) or ""
            self._begin(asked.voice).put_nowait(text)
            await self._finish()

    async def disconnect(self) -> None:
        """Cancel the speech, because the client disconnected or starts a new utterance."""
        speaking, self._speaking, self._text = self._speaking, None, None
        if speaking is not None:
            speaking.cancel()
            await asyncio.wait((speaking,))

    def _begin(self, voice: object) -> "asyncio.Queue[str | None]":
        name = _string("voice", getattr(voice, "speaker", None) or getattr(voice, "name", None))
        self._text = asyncio.Queue()
        self._speaking = asyncio.create_task(self._speak(self._text, name))
        return self._text

    async def _finish(self) -> None:
        text, self._text = self._text, None
        if text is not None:
            text.put_nowait(None)
        if self._speaking is not None:
            await asyncio.wait((self._speaking,))

    async def _speak(self, text: "asyncio.Queue[str | None]", voice: str | None) -> None:
        """Speak one utterance. Sends the end event even after failures, because clients wait for it."""
        with suppress(ConnectionError):  # the client disconnected
            await self.write_event(AudioStart(_RATE, _WIDTH, _CHANNELS).event())
            try:
                await self._converse(text, voice)
            except (aiohttp.ClientError, TimeoutError, TalkrayError) as error:
                await self._fail(f"{error or type(error).__name__}")
            await self.write_event(AudioStop().event())

    async def _converse(self, text: "asyncio.Queue[str | None]", voice: str | None) -> None:
        """Send the text and forward the speech. Raises `TalkrayError` with the server's message."""
        query = {"encoding": "linear16", "sample_rate": str(_RATE), **({"model": voice} if voice else {})}
        async with self._http.ws_connect(f"/v1/speak?{urlencode(query)}") as socket:
            writing = asyncio.create_task(_write(socket, text))
            try:
                await self._pass_on(socket)
            finally:
                writing.cancel()
                await asyncio.wait((writing,))

    async def _pass_on(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Forward audio until the server closes the WebSocket after the last chunk."""
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                await self.write_event(AudioChunk(_RATE, _WIDTH, _CHANNELS, message.data).event())
            elif (told := message.json())["type"] in ("Error", "Warning"):
                raise TalkrayError(told["description"])
        if socket.close_code != aiohttp.WSCloseCode.OK:
            raise TalkrayError(f"the server closed the WebSocket with code {socket.close_code} before the end")

    async def _fail(self, text: str) -> None:
        logger.error("%s", text)
        await self.write_event(Error(text=text, code="talkray").event())


async def _next_event(reader: asyncio.StreamReader) -> Event | None:
    """Return the next event, or None after a disconnect or an invalid event, which raises various errors."""
    try:
        event = await async_read_event(reader)
    except (EOFError, ConnectionError):
        return None
    except (AttributeError, KeyError, TypeError) as error:
        logger.warning("a client sent an invalid Wyoming event: %r", error)
        return None
    return event if event is not None and isinstance(event.data, dict) else None


def _parsed(kind: type[T], event: Event) -> T:
    """Parse an event. Raises TalkrayError."""
    try:
        parsed: T = kind.from_event(event)  # type: ignore[assignment]
    except (AttributeError, KeyError, TypeError) as error:
        raise TalkrayError(f"the data of the Wyoming event {event.type} is invalid: {error!r}") from error
    return parsed


def _string(name: str, value: object) -> str | None:
    """Return `value` if it is a string or None; otherwise raise `TalkrayError`."""
    if value is None:
        return None
    if not isinstance(value, str) or any("\ud800" <= char <= "\udfff" for char in value):
        raise TalkrayError(f"{name} must be a Unicode string")
    return value


async def _write(socket: aiohttp.ClientWebSocketResponse, text: "asyncio.Queue[str | None]") -> None:
    while (piece := await text.get()) is not None:
        await socket.send_json({"type": "Speak", "text": piece})
    await socket.send_json({"type": "Close"})
