"""Deepgram's Flux, `/v2/speak`: turns with a beginning, an end and an `Interrupt`."""

import secrets
from collections.abc import Mapping
from hashlib import blake2b

from deployments.errors import InvalidRequest
from serve_app.api.error_replies import ErrorReply
from serve_app.api.parsing.client_input import number, plain_number, text_of
from serve_app.extension import Dialect, Route, Sample
from serve_app.extensions.deepgram.deepgram import RAW, TurnSocket, plain, speak_text
from serve_app.extensions.live.connection import unknown_type
from serve_app.extensions.live.turns import Audio, Cleared, Event, Flushed, Started, Turn

_MOST_MS = 10**9
_SLOWEST, _FASTEST, _STEP = 0.5, 1.5, 0.05


class FluxSocket(TurnSocket):
    """`WS /v2/speak`."""

    words = True

    async def opened(self) -> None:
        await super().opened()
        self._rate = self.speech.delivery.rate(self.speech.info)
        self._finished_ms = self._interrupted_ms = 0  # of the session: audio of finished turns, and the last offset
        self._turn_samples = 0
        self._characters = 0
        self._num_ended = 0  # the last turn whose end was told
        self._offset_ms: int | None = None
        self._is_interrupting = False
        named = {"model_name": self.speech.info.name, "model_version": "1", "model_uuids": []}
        await self.send("Connected", request_id=self.request_id, **named, **self.speech.notes())

    async def obey(self, fields: dict[str, object]) -> None:
        match fields.get("type"):
            case "Speak":
                self._session.append(plain(text_of(fields)))
            case "Flush":
                await self._flush()
            case "Interrupt":
                await self._interrupt(fields.get("playback_offset"))
            case "Configure":
                await self._configure(fields.get("speed"))
            case "Close":
                self._session.close()
            case _:
                raise unknown_type("Speak", "Flush", "Interrupt", "Configure", "Close")

    async def refuse(self, error: InvalidRequest) -> None:
        await self._warn("MESSAGE-0000", error.message)

    async def tell_error(self, reply: ErrorReply) -> None:
        await self.send("Error", code=reply.code, description=reply.message)

    async def _warn(self, code: str, description: str) -> None:
        await self.send("Warning", code=code, description=description)

    async def _flush(self) -> None:
        if self._session.is_writing:
            await self.send("Flushed", speech_id=self._speech_id(self._session.flush()))
            return
        await self._warn("NO_ACTIVE_SPEECH", "There is no text to flush.")
        if not self._session.is_speaking:  # LiveKit waits for the end of a segment even if it had no word
            await self.send(
                "SpeechMetadata", **self._metadata(_speech_id(secrets.token_hex()), samples=0, characters=0)
            )

    async def _interrupt(self, playback_offset: object) -> None:
        sent = playback_offset.get("value") if isinstance(playback_offset, Mapping) else playback_offset
        offset_ms = number("playback_offset", sent)
        if offset_ms is not None and not 0 <= offset_ms <= _MOST_MS:
            message = f"playback_offset: its value must be milliseconds, from 0 to {_MOST_MS}."
            raise InvalidRequest(message, "playback_offset")
        is_active = self._session.is_speaking or self._session.is_writing
        is_playing = offset_ms is not None and offset_ms < self._finished_ms  # though all has been made and sent
        if self._is_interrupting:
            await self._warn("INTERRUPT_IN_PROGRESS", "The last interrupt has not been answered yet.")
        elif not is_active and not is_playing:
            await self._warn("NO_ACTIVE_SPEECH", "Nothing is being spoken.")
        elif offset_ms is not None and offset_ms <= self._interrupted_ms:
            await self._warn("INVALID_INTERRUPT_OFFSET", "The offset is not after the offset of the last interrupt.")
        else:
            self._offset_ms = None if offset_ms is None else int(offset_ms)
            self._is_interrupting = True
            await self._session.clear(None if offset_ms is None else (offset_ms - self._interrupted_ms) / 1000)

    async def _configure(self, speed: object) -> None:
        speed = plain_number(speed) if isinstance(speed, str) else speed
        if not isinstance(speed, int | float) or not _SLOWEST <= speed <= _FASTEST:
            code, why = "SPEED_OUT_OF_RANGE", f"speed must be from {_SLOWEST} to {_FASTEST}."
        elif abs(round(speed / _STEP) * _STEP - speed) > 1e-6:
            code, why = "SPEED_INCREMENT_INVALID", f"speed must be a multiple of {_STEP}."
        else:
            self._session.configure(speed=float(speed))
            await self.send("ConfigureSuccess", applied={"speed": speed})
            return
        await self.send("ConfigureFailure", code=code, field="speed", value=speed, description=why)

    async def say(self, event: Event) -> None:
        match event:
            case Started(turn):
                self._turn_samples = 0
                await self.send("SpeechStarted", speech_id=self._speech_id(turn))
            case Audio(turn, data):
                self._turn_samples += len(data) // self._sample_bytes
                await self.socket.send_bytes(data)
            case Flushed(turn):
                await self._end_turn(turn)
            case Cleared():
                await self._tell_interrupted(event)

    async def finish(self) -> None:
        counts = dict.fromkeys(("total_input_character_count", "total_billable_character_count"), self._characters)
        await self.send("SessionMetadata", total_audio_duration_ms=self._finished_ms, **counts)
        await super().finish()

    @property
    def _sample_bytes(self) -> int:
        return 2 if self.speech.delivery.audio_format == RAW["linear16"] else 1

    async def _end_turn(self, turn: Turn) -> None:
        if turn.utterance is None:
            await self._warn("NO_SYNTHESIZABLE_TEXT", "Nothing of the text can be spoken.")
        samples, self._turn_samples = self._turn_samples, 0
        self._characters, self._num_ended = self._characters + len(turn.text), turn.number
        self._finished_ms += self._ms(samples)
        metadata = self._metadata(self._speech_id(turn), samples=samples, characters=len(turn.text))
        await self.send("SpeechMetadata", **metadata, finish_reason=turn.finish_reason, **turn.usage.answer)

    async def _tell_interrupted(self, cleared: Cleared) -> None:
        """Only the client knows how much was played, and tells it; from there on the session counts."""
        turn, spoken = cleared.heard, cleared.spoken
        assert turn is not None, "there is something to interrupt"
        samples, self._turn_samples = self._turn_samples, 0
        generated_ms = self._finished_ms + self._ms(samples)
        played_ms = generated_ms if self._offset_ms is None else self._offset_ms
        if turn.number > self._num_ended:
            self._characters += len(turn.text)
        self._finished_ms = self._interrupted_ms = played_ms
        self._is_interrupting = False
        metadata = self._metadata(self._speech_id(turn), samples=samples, characters=len(turn.text))
        texts = {} if spoken is None else spoken.as_json()
        await self.send("SpeechInterrupted", audio_played_ms=played_ms, **texts, metadata=metadata)

    def _metadata(self, speech_id: str, *, samples: int, characters: int) -> dict[str, object]:
        controls = {"pronunciations_applied": 0, "breaks_applied": 0, "pronunciation_warnings": 0}
        return {
            "speech_id": speech_id,
            "audio_duration_ms": self._ms(samples),
            "input_character_count": characters,
            "billable_character_count": characters,
            "controls_applied": controls,
        }

    def _ms(self, samples: int) -> int:
        return round(samples * 1000 / self._rate)

    def _speech_id(self, turn: Turn) -> str:
        return _speech_id(f"{self.request_id}-{turn.number}")


def _speech_id(name: str) -> str:
    return f"dg_sp_{blake2b(name.encode(), digest_size=6).hexdigest()}"


DIALECT = Dialect(
    "Deepgram Flux",
    routes=(Route("POST /v2/speak", speak_text, "Speak a text (Deepgram Flux)"),),
    sockets=(("/v2/speak", FluxSocket),),
    heading="Deepgram",
    sample=Sample(
        "/v2/speak?model=flux-$voice-en&encoding=linear16&sample_rate=24000",
        messages=({"type": "Speak", "text": "$text"}, {"type": "Flush"}),
        clients=(
            'LiveKit:          deepgram.TTSv2(base_url="$url/v2/speak", api_key=KEY, model="flux-$voice-en")',
            (
                'Pipecat:          DeepgramFluxTTSService(url="$sockets/v2/speak", api_key=KEY, '
                'settings=DeepgramFluxTTSService.Settings(voice="flux-$voice-en"))'
            ),
        ),
    ),
)
