"""The native WebSocket: one utterance per message, PCM as binary frames, cancel at any time."""

import asyncio
import logging
from contextlib import aclosing

from fastapi import APIRouter
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from deployments.errors import InvalidRequest, Overloaded, PayloadTooLarge
from serve_app.api_settings import ApiSettings
from serve_app.audio import AudioFormat
from serve_app.client_limits import TRY_AGAIN_LATER, close_reason
from serve_app.delivery import Delivery
from serve_app.errors import INTERNAL, translate
from serve_app.rendering import Rendering
from serve_app.resumption import behind, parse_resumption
from serve_app.schemas import SpeechBody, parse_object, parse_speech
from serve_app.speech_request import build_request
from serve_app.speech_stream import Usage, audio_body
from serve_app.synthesizer import Synthesizer

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 4096
SAMPLE_BYTES = 2


def websocket_routes(synthesizer: Synthesizer, settings: ApiSettings) -> APIRouter:
    """`WS /v1/audio/speech/ws`."""
    router = APIRouter()

    @router.websocket("/v1/audio/speech/ws")
    async def speak(socket: WebSocket) -> None:
        await SpeechSocket(socket, synthesizer, settings).serve()

    return router


class Utterance:
    """One `speak` message on its way; `samples` and `usage` count what has been handed to the socket."""

    def __init__(self, request_id: str, socket: WebSocket) -> None:
        self.request_id = request_id
        self.usage = Usage()
        self.samples = 0
        self._socket = socket

    async def run(self, fields: dict[str, object], synthesizer: Synthesizer, settings: ApiSettings) -> None:
        """Speaks, or tells the client why not: nothing but cancellation leaves this."""
        try:
            await self._speak(fields, synthesizer, settings)
        except WebSocketDisconnect:
            logger.info("request %s: the client left", self.request_id)
        except Exception as error:
            await self._report(error)

    async def _speak(self, fields: dict[str, object], synthesizer: Synthesizer, settings: ApiSettings) -> None:
        body, resumption = _speech_body(fields), parse_resumption(fields)
        self._socket.state.caller.request()
        info = await synthesizer.describe()
        request = await build_request(body, info, settings, request_id=self.request_id)
        rendering = Rendering(Delivery(AudioFormat.PCM, speed=body.speed), info.sample_rate, info.frame_samples)
        had = resumption.from_frame * info.frame_samples * SAMPLE_BYTES
        async with aclosing(behind(audio_body(synthesizer.synthesize(request), rendering, self.usage), had)) as audio:
            first = await anext(audio, b"")
            await self._send("started", sample_rate=info.sample_rate, channels=1, format="pcm_s16le", seed=request.seed)
            await self._send_pcm(first)
            async for pcm in audio:
                await self._send_pcm(pcm)
        await self._send(
            "done",
            finish_reason=self.usage.finish_reason,
            frames=self.usage.frames,
            samples=self.samples,
            input_tokens=self.usage.input_tokens,
        )

    async def _send_pcm(self, pcm: bytes) -> None:
        for start in range(0, len(pcm), MAX_FRAME_BYTES):
            frame = pcm[start : start + MAX_FRAME_BYTES]
            self.samples += len(frame) // SAMPLE_BYTES
            await self._socket.send_bytes(frame)

    async def _send(self, kind: str, **fields: object) -> None:
        await self._socket.send_json({"type": kind, "request_id": self.request_id, **fields})

    async def _report(self, error: Exception) -> None:
        reply = translate(error)
        if reply.status == INTERNAL.status:
            logger.error("request %s failed", self.request_id, exc_info=error)
        try:
            await self._send("error", **reply.envelope())
            if isinstance(error, Overloaded):  # the proxy in front may know a server that has room
                await self._socket.close(TRY_AGAIN_LATER, close_reason(error))
        except (WebSocketDisconnect, RuntimeError):
            logger.info("request %s: the client left before its error", self.request_id)


class SpeechSocket:
    """One connection. It always reads, also while it speaks: only a reader learns that the client has left."""

    def __init__(self, socket: WebSocket, synthesizer: Synthesizer, settings: ApiSettings) -> None:
        self._socket = socket
        self._synthesizer = synthesizer
        self._settings = settings
        self._num_utterances = 0
        self._utterance: Utterance | None = None
        self._speaking: asyncio.Task[None] | None = None
        self._active_s = asyncio.get_running_loop().time()  # when something was said last, by either side

    async def serve(self) -> None:
        """Answers messages until the client leaves, says nothing for too long, or the server cancels the handler.

        Stops the utterance then.
        """
        await self._socket.accept()
        try:
            while (message := await self._receive())["type"] != "websocket.disconnect":
                await self._answer(message.get("text"))
        except TimeoutError:
            await self._socket.close(reason="idle")
        except WebSocketDisconnect:
            logger.info("connection %s: the client left", self._socket.state.request_id)
        finally:
            await self._stop()

    async def _receive(self) -> Message:
        """The next message. Raises TimeoutError once the socket has been idle for too long."""
        receiving = asyncio.create_task(self._socket.receive())
        try:
            while not receiving.done():
                remaining_s = self._remaining_s()
                if remaining_s <= 0:
                    raise TimeoutError
                await asyncio.wait((receiving,), timeout=remaining_s)
            self._touch()
            return receiving.result()
        finally:
            receiving.cancel()

    def _remaining_s(self) -> float:
        """Until the socket has been idle for too long, if nothing happens."""
        if self._speaking is not None and not self._speaking.done():
            return self._settings.idle_timeout_s
        return self._active_s + self._settings.idle_timeout_s - asyncio.get_running_loop().time()

    def _touch(self, _: object = None) -> None:
        self._active_s = asyncio.get_running_loop().time()

    async def _answer(self, text: str | None) -> None:
        try:
            await self._obey(self._parse(text))
        except InvalidRequest as error:
            await self._socket.send_json({"type": "error", "request_id": None, **translate(error).envelope()})

    def _parse(self, text: str | None) -> dict[str, object]:
        if text is None:
            raise InvalidRequest("Messages are JSON text, not binary.", None, "invalid_json")
        limit = self._settings.max_body_bytes if '"ref_audio"' in text else self._settings.max_message_bytes
        if len(text.encode()) > limit:
            raise PayloadTooLarge(f"The message is larger than {limit} bytes.")
        return parse_object(text)

    async def _obey(self, fields: dict[str, object]) -> None:
        match fields.get("type"):
            case "speak":
                self._start(fields)
            case "cancel":
                await self._cancel()
            case _:
                raise InvalidRequest("type must be 'speak' or 'cancel'.", "type")

    def _start(self, fields: dict[str, object]) -> None:
        if self._speaking is not None and not self._speaking.done():
            raise InvalidRequest("An utterance is being spoken; cancel it or wait for it to end.", "type", "busy")
        self._num_utterances += 1
        own_id = f"{self._socket.state.request_id}-{self._num_utterances}"
        self._utterance = Utterance(parse_resumption(fields).request_id or own_id, self._socket)
        self._speaking = asyncio.create_task(self._utterance.run(fields, self._synthesizer, self._settings))
        self._speaking.add_done_callback(self._touch)

    async def _cancel(self) -> None:
        """Always answered: with null for the request if nothing was being spoken, or its end was already on its way."""
        stopped = await self._stop()
        request_id = stopped.request_id if stopped else None
        frames, samples = (stopped.usage.frames, stopped.samples) if stopped else (0, 0)
        await self._socket.send_json(
            {"type": "cancelled", "request_id": request_id, "frames": frames, "samples": samples}
        )

    async def _stop(self) -> Utterance | None:
        """The utterance that this stopped, if any was running."""
        speaking, self._speaking = self._speaking, None
        if speaking is None:
            return None
        speaking.cancel()
        await asyncio.wait((speaking,))
        return self._utterance if speaking.cancelled() else None


def _speech_body(fields: dict[str, object]) -> SpeechBody:
    body = parse_speech(fields)
    if body.response_format not in (None, AudioFormat.PCM):
        raise InvalidRequest("The WebSocket sends pcm only.", "response_format")
    return body
