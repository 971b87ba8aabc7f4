"""The native WebSocket: one utterance per message, PCM as binary frames, cancel at any time."""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from deployments.errors import InvalidRequest, Overloaded, PayloadTooLarge
from serve_app import ignored
from serve_app.audio import AudioFormat, Rendering
from serve_app.config import ApiSettings
from serve_app.errors import INTERNAL, POLICY_VIOLATION, TRY_AGAIN_LATER, Unauthorized, close_reason, translate
from serve_app.request_log import SAMPLE_BYTES, RequestRecord
from serve_app.speech_request import MAX_BODY_BYTES, SpeechBody, build_request, invalid, parse_object, parse_speech
from serve_app.speech_response import audio_body
from serve_app.synthesizer import Synthesizer

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 128 << 10  # without reference audio
MAX_FRAME_BYTES = 4096
_ALWAYS_STREAMED = "a WebSocket sends pcm as it comes"
IDLE_TIMEOUT_S = 600.0  # of a socket on which nothing is said, either way


def websocket_routes(synthesizer: Synthesizer, settings: ApiSettings) -> APIRouter:
    """`WS /v1/audio/speech/ws`, and a 404 for a handshake anywhere else, where Starlette's own answer is a 403."""
    router = APIRouter()

    @router.websocket("/v1/audio/speech/ws")
    async def speak(socket: WebSocket) -> None:
        await SpeechSocket(socket, synthesizer, settings).serve()

    @router.websocket("/{path:path}")
    async def unknown(socket: WebSocket) -> None:
        reply = translate(HTTPException(404))
        socket.state.record.error = reply.code
        await socket.send_denial_response(reply.response())

    return router


class Resumption(BaseModel):
    """The fields of a `speak` message that goes on with an utterance whose connection was lost.

    Codes follow from the seed, so it is spoken again and skipped: the client sends the `request_id` and `seed` of
    `started`, and how many whole frames of audio it has.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    from_frame: Annotated[int, Field(ge=0, lt=2**31)] = 0
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    seed: int | None = None


def parse_resumption(fields: Mapping[str, object]) -> Resumption:
    """Raises InvalidRequest that names the field; going on without the seed would be another utterance."""
    try:
        resumption = Resumption.model_validate(fields)
    except ValidationError as error:
        raise invalid(error) from error
    if resumption.from_frame and resumption.seed is None:
        raise InvalidRequest("seed is required with from_frame.", "seed", "missing_required_parameter")
    return resumption


class Utterance:
    """One `speak` message on its way; `samples` and `usage` count what has been handed to the socket."""

    def __init__(self, request_id: str, socket: WebSocket) -> None:
        self.request_id = request_id
        self.record = RequestRecord(request_id, time.time_ns(), socket.state.record.client)
        self.usage = self.record.usage
        self.samples = 0
        self._socket = socket
        self._had = 0  # bytes of audio that the client has already

    async def run(self, fields: dict[str, object], synthesizer: Synthesizer, settings: ApiSettings) -> None:
        """Speaks, or tells the client why not: nothing but cancellation leaves this."""
        try:
            await self._speak(fields, synthesizer, settings)
        except asyncio.CancelledError:
            self.record.error = "cancelled"
            raise
        except WebSocketDisconnect:
            self.record.error = "client left"
            logger.info("request %s: the client left", self.request_id)
        except Exception as error:
            await self._report(error)
        finally:
            self.record.publish()

    async def _speak(self, fields: dict[str, object], synthesizer: Synthesizer, settings: ApiSettings) -> None:
        body, resumption = _speech_body(fields), parse_resumption(fields)
        caller = self._socket.state.caller
        caller.request()
        info = await synthesizer.describe()
        request = await build_request(body, info, settings, request_id=self.request_id, client=caller.name)
        entries = ignored.entries(ignored.ignored(fields, body, info, other=_beside_a_body(body)))
        without_effect = {"ignored": entries} if entries else {}
        rendering = Rendering(AudioFormat.PCM, info.sample_rate, info.frame_samples, speed=body.speed)
        self.record.voice, self.record.samples_per_s = request.voice, info.sample_rate * body.speed
        self._had = resumption.from_frame * info.frame_samples * SAMPLE_BYTES
        async with aclosing(audio_body(synthesizer.synthesize(request), rendering, self.usage)) as audio:
            first = await anext(audio, b"")
            await self._send(
                "started",
                sample_rate=info.sample_rate,
                channels=1,
                format="pcm_s16le",
                seed=request.seed if self.usage.seed is None else self.usage.seed,
                **without_effect,
            )
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
        pcm, self._had = pcm[self._had :], max(0, self._had - len(pcm))
        for start in range(0, len(pcm), MAX_FRAME_BYTES):
            frame = pcm[start : start + MAX_FRAME_BYTES]
            self.samples += len(frame) // SAMPLE_BYTES
            await self._socket.send_bytes(frame)

    async def _send(self, kind: str, **fields: object) -> None:
        await self._socket.send_json({"type": kind, "request_id": self.request_id, **fields})

    async def _report(self, error: Exception) -> None:
        reply = translate(error)
        self.record.error = reply.code
        if reply.status == INTERNAL.status:
            logger.error("request %s failed", self.request_id, exc_info=error)
        try:
            await self._send("error", **reply.envelope())
            if isinstance(error, Overloaded):  # the proxy in front may know a server that has room
                await self._socket.close(TRY_AGAIN_LATER, close_reason(error))
            elif isinstance(error, Unauthorized):
                await self._socket.close(POLICY_VIOLATION, reply.code)
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
            return IDLE_TIMEOUT_S
        return self._active_s + IDLE_TIMEOUT_S - asyncio.get_running_loop().time()

    def _touch(self, _: object = None) -> None:
        self._active_s = asyncio.get_running_loop().time()

    async def _answer(self, text: str | None) -> None:
        try:
            await self._obey(self._parse(text))
        except InvalidRequest as error:
            connection: RequestRecord = self._socket.state.record
            replace(connection, error=error.code).publish()
            await self._socket.send_json({"type": "error", "request_id": None, **translate(error).envelope()})

    def _parse(self, text: str | None) -> dict[str, object]:
        if text is None:
            raise InvalidRequest("Messages are JSON text, not binary.", None, "invalid_json")
        limit = MAX_BODY_BYTES if '"ref_audio"' in text else MAX_MESSAGE_BYTES
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


def _beside_a_body(body: SpeechBody) -> dict[str, str | None]:
    """Fields of a `speak` message besides those that count over HTTP as well, and what of these does not count here."""
    reasons: dict[str, str | None] = dict.fromkeys(("type", *Resumption.model_fields))
    if not body.stream:
        reasons["stream"] = _ALWAYS_STREAMED
    if body.stream_format == "sse":
        reasons["stream_format"] = _ALWAYS_STREAMED
    return reasons


def _speech_body(fields: dict[str, object]) -> SpeechBody:
    body = parse_speech(fields)
    if body.response_format not in (None, AudioFormat.PCM):
        raise InvalidRequest("The WebSocket sends pcm only.", "response_format")
    return body
