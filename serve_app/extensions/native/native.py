"""Native WebSocket. Each `speak` message starts an utterance, whose PCM arrives in binary frames. `cancel` stops it."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from starlette.websockets import WebSocket

from deployments.errors import InvalidRequest, Overloaded
from deployments.protocol import SAMPLE_BYTES
from serve_app.api.context import state_of
from serve_app.api.error_replies import Unauthorized, translate
from serve_app.api.parsing.speech_body import names_of, parse_speech, validated
from serve_app.api.request_record import Usage
from serve_app.api.resolve.ignored_fields import Ignored
from serve_app.api.resolve.speech_request import Delivery
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Dialect
from serve_app.extensions.continuity.tails import NO_TAIL, PREVIOUS, Continuation, ContinuityFields
from serve_app.extensions.live.connection import Connection, always_streamed, unknown_type
from serve_app.extensions.live.session import Session
from serve_app.extensions.live.turns import Audio, Event, Failed, Flushed, Started, Turn, Words
from serve_app.speech.observers import marked, word_entries


class Resumption(BaseModel):
    """Fields of a `speak` message that resumes an utterance after a lost connection.

    The seed determines the codes, so the server repeats the utterance and skips the first frames. The client sends
    `request_id`, `seed` and `previous_request_id` from `started`, and the number of complete frames that it received.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    from_frame: Annotated[int, Field(ge=0, lt=2**31)] = 0
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    seed: int | None = None
    previous_request_id: str | None = None


class Cancellation(BaseModel):
    """Fields of a `cancel` message."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    played_ms: Annotated[float | None, Field(ge=0, le=1e9, allow_inf_nan=False)] = None


def parse_resumption(fields: Mapping[str, object]) -> Resumption:
    """Parse the fields of a resumption. Raises InvalidRequest, naming the wrong field.

    `from_frame` requires the seed, because another seed would give a different utterance.
    """
    resumption = validated(Resumption, fields)
    if resumption.from_frame and resumption.seed is None:
        raise InvalidRequest("from_frame requires seed. Send both.", "seed", "missing_required_parameter")
    return resumption


class SpeakMessage:
    """A `speak` message in progress. `samples` and `usage` count the audio sent to the client."""

    def __init__(self, request_id: str, connection: Connection, continuation: Continuation) -> None:
        self.request_id = request_id
        self._continuation = continuation
        self.usage = Usage()
        self.samples = 0
        self.is_over = False  # whether the utterance has ended and the last message is on its way
        self.turn: Turn | None = None
        self._connection = connection
        self._had = 0  # bytes of audio that the client already has

    async def run(self, fields: dict[str, object], service: SpeechService) -> None:
        """Speak the utterance, or send an error to the client."""
        try:
            session = await self._open(fields, service)
        except Exception as error:
            await self._report(error)
            record = state_of(self._connection.socket).record.another(self.request_id)
            replace(record, error=translate(error).code).publish()
        else:
            await self._connection.pass_on(session, self._say)

    async def _open(self, fields: dict[str, object], service: SpeechService) -> Session:
        body = parse_speech(service.resolver.body, fields, service.settings)
        resumption = parse_resumption(fields)
        if body.response_format not in (None, AudioFormat.PCM):
            raise InvalidRequest("response_format must be pcm on this WebSocket.", "response_format")
        previous_id = body.of(ContinuityFields).previous_request_id
        if previous_id is not None or body.seed is not None:  # the seed must determine the speech
            self._continuation.previous_id = previous_id
        info = await service.resolver.choose_model(dict(body), sent=fields)
        reasons = always_streamed(fields)
        reasons.pop(PREVIOUS, None)
        delivery = Delivery(AudioFormat.PCM, speed=body.speed, sample_rate=body.sample_rate)
        self._format: dict[str, object] = {"sample_rate": delivery.rate(info), "channels": 1, "format": "pcm_s16le"}
        self._had = resumption.from_frame * info.frame_samples * delivery.rate(info) // info.sample_rate * SAMPLE_BYTES
        voice = await service.resolver.choose_voice(body.voice, body, info)
        names = {**dict.fromkeys(("type", *Resumption.model_fields)), **names_of(service.resolver.body)}
        ignored = Ignored(fields, names, {**reasons, **voice.ignored})
        speech = await service.resolver.complete(body, info, delivery=delivery, ignored=ignored, voice=voice)
        self._speech = speech
        session = self._connection.new_session(
            replace(speech, ignored={}), request_id=self.request_id, live=False, continuation=self._continuation
        )
        session.append(speech.body.input)
        self.turn = session.flush()
        self.usage = self.turn.usage
        session.close()
        return session

    async def _say(self, event: Event) -> None:
        match event:
            case Started(turn):
                drawn = turn.utterance.synthesis.seed if turn.utterance is not None else 0  # 0 if the turn is silent
                seed = drawn if turn.usage.seed is None else turn.usage.seed
                await self._send("started", **self._format, seed=seed, **self._joint(turn), **self._notes(turn))
            case Audio(_, pcm):
                await self._send_pcm(pcm)
            case Words(_, words):
                await self._send("words", words=word_entries(words), **marked(words))
            case Flushed(turn):
                self.is_over = True
                await self._send(
                    "done",
                    finish_reason=turn.usage.finish_reason,
                    frames=turn.usage.frames,
                    samples=self.samples,
                    input_tokens=turn.usage.input_tokens,
                    **turn.usage.answer,
                )
            case Failed(error):
                await self._report(error)

    def _joint(self, turn: Turn) -> dict[str, object]:
        """Return the ID of the request that this utterance continues, if there is one."""
        is_joined = turn.utterance is not None and turn.utterance.synthesis.tail is not None
        return {"previous_request_id": self._continuation.previous_id} if is_joined else {}

    def _notes(self, turn: Turn) -> dict[str, object]:
        speech = self._speech
        if speech.body.of(ContinuityFields).previous_request_id is not None and not self._joint(turn):
            speech = replace(speech, ignored={**speech.ignored, PREVIOUS: NO_TAIL})
        return speech.notes()

    async def _send_pcm(self, pcm: bytes) -> None:
        pcm, self._had = pcm[self._had :], max(0, self._had - len(pcm))
        if pcm:
            self.samples += len(pcm) // SAMPLE_BYTES
            await self._connection.socket.send_bytes(pcm)

    async def _send(self, kind: str, **fields: object) -> None:
        await self._connection.send(kind, request_id=self.request_id, **fields)

    async def _report(self, error: Exception) -> None:
        self.is_over = True
        await self._send("error", **self._connection.failure(error, self.request_id).envelope())
        if isinstance(error, Overloaded | Unauthorized):
            await self._connection.end_for(error)


class SpeechSocket(Connection):
    """Connection of the native WebSocket."""

    takes_recordings = True

    def __init__(self, socket: WebSocket, service: SpeechService) -> None:
        super().__init__(socket, service)
        self._continuation = self.new_continuation()
        self._utterance: SpeakMessage | None = None
        self._task: asyncio.Task[None] | None = None

    async def serve(self, headers: Mapping[str, str] | None = None) -> None:
        try:
            await super().serve(headers)
        finally:
            self._task = self._utterance = None  # both refer to this connection

    async def obey(self, fields: dict[str, object]) -> None:
        """Handle a `speak` or `cancel` message."""
        match fields.get("type"):
            case "speak":
                await self._start(fields)
            case "cancel":
                await self._cancel(validated(Cancellation, fields).played_ms)
            case _:
                raise unknown_type("'speak'", "'cancel'")

    async def _start(self, fields: dict[str, object]) -> None:
        if self._task is not None and self._utterance is not None and self._utterance.is_over:
            await asyncio.wait((self._task,))  # the client may receive the last message before the task ends
        if self.is_busy:
            raise InvalidRequest("An utterance is in progress. Cancel it or wait until it ends.", "type", "busy")
        own_id = self.next_id()
        self._utterance = SpeakMessage(parse_resumption(fields).request_id or own_id, self, self._continuation)
        self._task = self.start(self._utterance.run(fields, self.service))

    async def _cancel(self, played_ms: float | None) -> None:
        """Stop the utterance and always reply. `request_id` is null if no utterance is in progress.

        `played_ms` is how much of the utterance's audio has been heard. The reply contains the text that was heard.
        """
        task, self._task = self._task, None
        await self.stop()
        self._continuation.break_off()
        stopped = self._utterance if task is not None and task.cancelled() else None
        request_id = stopped.request_id if stopped else None
        frames, samples = (stopped.usage.frames, stopped.samples) if stopped else (0, 0)
        turn = self._utterance.turn if self._utterance is not None else None
        spoken = turn.spoken(played_ms / 1000) if turn is not None and played_ms is not None else None
        texts = {} if spoken is None else spoken.as_json()
        await self.send("cancelled", request_id=request_id, frames=frames, samples=samples, **texts)


DIALECT = Dialect("Talkray", sockets=(("/v1/audio/speech/ws", SpeechSocket),))
