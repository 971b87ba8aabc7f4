"""Stream codec frames instead of audio to clients that decode them themselves. See docs/codec-frames.md for the format.

The server also decodes the frames, so that it can drop the silence at the start and stop runaway speech.
"""

import struct
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocketDisconnect

from deployments.errors import InvalidRequest
from deployments.protocol import FinishReason, ModelInfo, PcmChunk
from serve_app.api.context import state_of
from serve_app.api.headers import UNBUFFERED_HEADERS
from serve_app.api.request_record import Usage
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.api.responses.speech_response import SpeechResponse, WholeAttempt, WholeResponse
from serve_app.api.responses.whole_audio import ByteQuota
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Dialect, Route
from serve_app.extensions.continuity.tails import PREVIOUS
from serve_app.extensions.live.connection import Connection, always_streamed, unknown_type

CONTENT_TYPE = "application/x-talkray-frames"
MAGIC, VERSION = b"TRCF", 1
HEADER = struct.Struct("<4sBBHII")  # magic, version, codebooks, 0, samples per second, samples per frame
RECORD = struct.Struct("<BxxxI")  # kind, number
FRAMES, PLAY, DROP, SILENCE, RESTART, END = b"fpdsre"
END_REASONS = tuple(FinishReason)
# Fields that would change the decoded audio.
_OF_AUDIO = ("response_format", "stream_format", "sample_rate", "speed", "word_timestamps")


async def speak(service: SpeechService, request: Request) -> Response:
    """Speak `input` as a stream of records. The other fields are the same as in `/v1/audio/speech`."""
    speech = await _speech_request(service, await service.read_fields(request))
    utterance = await service.prepare_utterance(request, speech)
    usage = state_of(request).record.usage
    body = _records(service.models.of(utterance).speak(utterance, speech.info), speech.info, usage)
    headers = {"content-type": CONTENT_TYPE, **UNBUFFERED_HEADERS}
    headers |= speech.headers() | usage.headers()
    if speech.delivery.whole:
        return WholeResponse(WholeAttempt(body, usage), headers, quota=ByteQuota(state_of(request).caller.name))
    return SpeechResponse(body, headers, usage=usage)


async def _speech_request(
    service: SpeechService, fields: Mapping[str, object], *, reasons: Mapping[str, str] | None = None
) -> SpeechRequest:
    """Create a request for frames. Raises InvalidRequest if a field would change the decoded audio."""
    if named := next((name for name in _OF_AUDIO if name in fields), None):
        raise InvalidRequest(f"{named} changes only audio, not codec frames. Remove the field.", named)
    reasons = {**(reasons or {}), **({PREVIOUS: "only for audio"} if fields.get(PREVIOUS) else {})}
    speech = await service.resolver.strict_request(
        fields, default=AudioFormat.PCM, reasons=reasons, overrides={PREVIOUS: None}
    )
    if any(span.speed != 1 for span in speech.spoken.spans):
        raise InvalidRequest("input: <prosody rate> changes only audio, not codec frames. Remove it.", "input")
    if speech.body.ref_audio is not None and not (speech.body.x_vector_only_mode or speech.info.clones_by_vector):
        reason = "speech would continue frames of the recording, which are not sent. Set x_vector_only_mode"
        raise InvalidRequest(f"ref_audio: {reason}.", "ref_audio")
    return speech


class Records:
    """Encoder that converts the chunks of one utterance to bytes."""

    def __init__(self, info: ModelInfo) -> None:
        self._header = HEADER.pack(MAGIC, VERSION, info.num_code_groups, 0, info.sample_rate, info.frame_samples)
        self._segment = self._position = 0

    def add(self, chunk: PcmChunk) -> bytes:
        """Return the records of a chunk: its frames, the number of samples to drop, and the number to play."""
        records = bytearray()
        if chunk.segment != self._segment:
            self._segment, self._position = chunk.segment, 0
            records += RECORD.pack(RESTART, 0)
        if len(chunk.codes):
            records += RECORD.pack(FRAMES, len(chunk.codes)) + chunk.codes.astype("<u2").tobytes()
        if chunk.pcm:
            heard = chunk.num_samples
            dropped = chunk.position - self._position - heard
            if dropped < 0:  # audio without frames
                records += RECORD.pack(SILENCE, heard)
            else:
                records += (RECORD.pack(DROP, dropped) if dropped else b"") + RECORD.pack(PLAY, heard)
                self._position = chunk.position
        if chunk.finish_reason is not None:
            records += RECORD.pack(END, END_REASONS.index(chunk.finish_reason))
        if not records:
            return b""
        header, self._header = self._header, b""
        return header + bytes(records)


async def _records(
    chunks: AsyncGenerator[PcmChunk, None], info: ModelInfo, usage: Usage
) -> AsyncGenerator[bytes, None]:
    records = Records(info)
    async with aclosing(chunks):
        async for chunk in chunks:
            usage.add(chunk)
            if data := records.add(chunk):
                yield data


class FramesSocket(Connection):
    """Connection with the `speak` and `cancel` messages of the native WebSocket, which sends records."""

    takes_recordings = True

    async def obey(self, fields: dict[str, object]) -> None:
        match fields.pop("type", None):
            case "speak" if self.is_busy:
                raise InvalidRequest("An utterance is in progress. Cancel it or wait until it ends.", "type", "busy")
            case "speak":
                speech = await _speech_request(self.service, fields, reasons=always_streamed(fields))
                self.start(self._speak(speech, self.next_id()))
            case "cancel":
                await self.stop()
                await self.send("cancelled")
            case _:
                raise unknown_type("'speak'", "'cancel'")

    async def _speak(self, speech: SpeechRequest, request_id: str) -> None:
        state = state_of(self.socket)
        record = state.record.another(request_id)
        try:
            state.caller.count_request()
            utterance = await self.service.prepare_utterance(self.socket, speech, record=record)
            chunks = self.service.models.of(utterance).speak(utterance, speech.info)
            async with aclosing(_records(chunks, speech.info, record.usage)) as records:
                async for data in records:
                    await self.socket.send_bytes(data)
            frames, reason = record.usage.frames, record.usage.finish_reason
            record.usage.left_out = speech.spoken.left_out
            notes = speech.notes() | record.usage.answer
            await self.send("done", request_id=request_id, finish_reason=reason, frames=frames, **notes)
        except (WebSocketDisconnect, RuntimeError):  # the client has left
            raise
        except Exception as error:
            reply = self.failure(error, request_id)
            record.error = reply.code
            await self.send("error", request_id=request_id, **reply.envelope())
        finally:
            record.error = record.error or (None if record.usage.finish_reason else "cancelled")
            record.publish()


DIALECT = Dialect(
    "Codec frames",
    routes=(Route("POST /v1/audio/frames", speak, "Speak a text as codec frames"),),
    sockets=(("/v1/audio/frames/ws", FramesSocket),),
)
