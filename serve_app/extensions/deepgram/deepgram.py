"""Deepgram's API: speak streamed text over a WebSocket, or a complete text over HTTP.

Aura (`/v1/speak`) supports `Clear`. Flux (`/v2/speak`) reports the start and end of turns, and supports `Interrupt`.
"""

import re
import secrets
from collections.abc import Mapping
from hashlib import blake2b
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from deployments.errors import InvalidRequest
from serve_app.api.error_replies import ErrorReply
from serve_app.api.parsing import field_names
from serve_app.api.parsing.client_input import format_named, number, plain_number, text_of
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest
from serve_app.api.responses.respond import respond
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Dialect, Route, Sample
from serve_app.extensions.live.connection import ConversationConnection, HandshakeConnection, unknown_type
from serve_app.extensions.live.turns import Audio, Cleared, Event, Flushed, Started, Turn

RAW = {"linear16": AudioFormat.PCM, "mulaw": AudioFormat.MULAW, "alaw": AudioFormat.ALAW}
FILES = {name: AudioFormat(name) for name in ("mp3", "opus", "flac", "aac")}
# Inline pronunciation of a word.
_PRONUNCIATION = re.compile(r'\\?\{\s*"word"\s*:\s*"((?:[^"\\]++|\\.)*+)"\s*,\s*"pronounce"\s*:\s*"[^"]*"\s*\\?\}')
_PAUSE = re.compile(r"\\?\{\s*pause\s*:\s*(\d{1,5}\s*m?s)\s*\\?\}")
_MOST_CHARS = 1 << 17  # search limit; the server rejects longer texts
# Deepgram's model names contain a voice and a language: aura-2-thalia-en, flux-alexis-en.
_MODEL = re.compile(r"(?:aura(?:-\d+)?|flux)-(.+)-[a-z]{2}")
_TELEPHONE_HZ = 8000  # default rate of mu-law and A-law
_CONTAINERS = ("none", "wav", "ogg")
_NAMES: field_names.Names = {  # query parameters, and the field with the text in the body
    "text": "input",
    "model": "voice",
    "sample_rate": "sample_rate",
    "speed": "speed",
    "bit_rate": "bit_rate",
    "encoding": None,
    "container": None,
}
_MOST_MS = 10**9
_SLOWEST, _FASTEST, _STEP = 0.5, 1.5, 0.05


async def speech_request(
    service: SpeechService, query: Mapping[str, str], *, body: Mapping[str, object] | None = None, words: bool = False
) -> SpeechRequest:
    """Create a request from a query. HTTP requests have a `body`. `words` enables word times. Raises InvalidRequest."""
    choices, default = (RAW, "linear16") if body is None else (RAW | FILES, "mp3")
    encoding, container = query.get("encoding", default).strip().lower(), query.get("container", "").strip().lower()
    audio_format = format_named("encoding", encoding, choices)
    is_raw = encoding in RAW
    in_wav = is_raw and body is not None and container != "none"
    bit_rate = number("bit_rate", query.get("bit_rate"))
    delivery = Delivery(
        audio_format,
        bit_rate=None if bit_rate is None else int(bit_rate),
        sample_rate=_TELEPHONE_HZ if audio_format in (AudioFormat.MULAW, AudioFormat.ALAW) else None,
        in_wav=in_wav,
    )
    named = _MODEL.fullmatch(query.get("model", ""))
    overrides = {
        "input": "" if body is None else plain(text_of(body)),
        "voice": named[1] if named else query.get("model"),
        "sample_rate": number("sample_rate", query.get("sample_rate")),
        "speed": number("speed", query.get("speed")),
        "word_timestamps": words,
    }
    reasons = {name: "send it in the query instead" for name in _NAMES if name in (body or {}) and name != "text"}
    comes_in = "wav" if in_wav else "ogg" if audio_format is AudioFormat.OPUS else "none"
    if container not in ("", comes_in):
        reasons["container"] = "WebSockets have none" if body is None else f"{encoding} uses {comes_in}"
    if body is not None and _PRONUNCIATION.search(text_of(body)[:_MOST_CHARS]):
        reasons["pronounce"] = "phonemes are not supported: the word itself is spoken"
    return await service.resolver.lenient_request(
        {**(body or {}), **query}, _NAMES, delivery=delivery, overrides=overrides, reasons=reasons
    )


async def speak_text(service: SpeechService, request: Request) -> Response:
    """Speak the `text` of a JSON body, as MP3 unless the query selects another encoding."""
    speech = await speech_request(service, request.query_params, body=await service.read_fields(request))
    return await respond(service, request, speech)


def plain(text: str) -> str:
    """Replace inline pronunciations (phonemes) with the words they belong to, and pauses with Talkray's markup."""
    return _PAUSE.sub(r"[pause:\1]", _PRONUNCIATION.sub(r"\1", text)) if len(text) <= _MOST_CHARS else text


class TurnSocket(HandshakeConnection, ConversationConnection):
    """Base class for sockets with a single session, which the handshake configures."""

    reason_header = "dg-error"
    words: ClassVar[bool] = False  # whether the session determines word times

    @classmethod
    async def speech_request(cls, socket: WebSocket, service: SpeechService) -> SpeechRequest:
        return await speech_request(service, socket.query_params, words=cls.words)

    async def opened(self) -> None:
        self.converse(self.speech)


class AuraSocket(TurnSocket):
    """Connection of Aura's `WS /v1/speak`."""

    async def opened(self) -> None:
        await super().opened()
        self._num_flushed = self._num_cleared = 0
        name = self.speech.info.name
        notes = {"model_version": "1", "model_uuid": self.request_id, **self.speech.notes()}
        await self.send("Metadata", request_id=self.request_id, model_name=name, **notes)

    async def obey(self, fields: dict[str, object]) -> None:
        match fields.get("type"):
            case "Speak":
                self.session.append(plain(text_of(fields)))
            case "Flush":
                self.session.flush()
            case "Clear":
                await self.session.clear()
            case "Close":
                self.session.close()
            case _:
                raise unknown_type("Speak", "Flush", "Clear", "Close")

    async def refuse(self, error: InvalidRequest) -> None:
        # LiveKit shows `warn_msg`; other clients show `description`.
        code, said = error.code, error.message
        await self.send("Warning", code=code, description=said, warn_code=code, warn_msg=said)

    async def tell_error(self, reply: ErrorReply) -> None:
        await self.send("Error", code=reply.code, description=reply.message, message=reply.message)

    async def say(self, event: Event) -> None:
        match event:
            case Audio(_, data):
                await self.socket.send_bytes(data)
            case Flushed(turn):
                notes = {"finish_reason": turn.finish_reason, **turn.usage.answer}
                await self.send("Flushed", sequence_id=self._num_flushed, **notes)
                self._num_flushed += 1
            case Cleared():
                await self.send("Cleared", sequence_id=self._num_cleared)
                self._num_cleared += 1


class FluxSocket(TurnSocket):
    """Connection of Flux's `WS /v2/speak`."""

    words = True

    async def opened(self) -> None:
        await super().opened()
        self._rate = self.speech.delivery.rate(self.speech.info)
        self._finished_ms = self._interrupted_ms = 0  # audio of finished turns; offset of the last interrupt
        self._turn_samples = 0
        self._characters = 0
        self._num_ended = 0  # number of the last turn whose end was reported
        self._offset_ms: int | None = None
        self._is_interrupting = False
        named = {"model_name": self.speech.info.name, "model_version": "1", "model_uuids": []}
        await self.send("Connected", request_id=self.request_id, **named, **self.speech.notes())

    async def obey(self, fields: dict[str, object]) -> None:
        match fields.get("type"):
            case "Speak":
                self.session.append(plain(text_of(fields)))
            case "Flush":
                await self._flush()
            case "Interrupt":
                await self._interrupt(fields.get("playback_offset"))
            case "Configure":
                await self._configure(fields.get("speed"))
            case "Close":
                self.session.close()
            case _:
                raise unknown_type("Speak", "Flush", "Interrupt", "Configure", "Close")

    async def refuse(self, error: InvalidRequest) -> None:
        await self._warn("MESSAGE-0000", error.message)

    async def tell_error(self, reply: ErrorReply) -> None:
        await self.send("Error", code=reply.code, description=reply.message)

    async def _warn(self, code: str, description: str) -> None:
        await self.send("Warning", code=code, description=description)

    async def _flush(self) -> None:
        if self.session.is_writing:
            await self.send("Flushed", speech_id=self._speech_id(self.session.flush()))
            return
        await self._warn("NO_ACTIVE_SPEECH", "There is no text to flush.")
        if not self.session.is_speaking:  # LiveKit also waits for empty segments to end
            await self.send(
                "SpeechMetadata", **self._metadata(_speech_id(secrets.token_hex()), samples=0, characters=0)
            )

    async def _interrupt(self, playback_offset: object) -> None:
        sent = playback_offset.get("value") if isinstance(playback_offset, Mapping) else playback_offset
        offset_ms = number("playback_offset", sent)
        if offset_ms is not None and not 0 <= offset_ms <= _MOST_MS:
            message = f"playback_offset must be in milliseconds, from 0 to {_MOST_MS}."
            raise InvalidRequest(message, "playback_offset")
        is_active = self.session.is_speaking or self.session.is_writing
        is_playing = offset_ms is not None and offset_ms < self._finished_ms  # even though all audio has been sent
        if self._is_interrupting:
            await self._warn("INTERRUPT_IN_PROGRESS", "The previous interrupt is still in progress.")
        elif not is_active and not is_playing:
            await self._warn("NO_ACTIVE_SPEECH", "There is no speech to interrupt.")
        elif offset_ms is not None and offset_ms <= self._interrupted_ms:
            await self._warn("INVALID_INTERRUPT_OFFSET", "The offset must be greater than the previous one.")
        else:
            self._offset_ms = None if offset_ms is None else int(offset_ms)
            self._is_interrupting = True
            await self.session.clear(None if offset_ms is None else (offset_ms - self._interrupted_ms) / 1000)

    async def _configure(self, speed: object) -> None:
        speed = plain_number(speed) if isinstance(speed, str) else speed
        if not isinstance(speed, int | float) or not _SLOWEST <= speed <= _FASTEST:
            code, why = "SPEED_OUT_OF_RANGE", f"speed must be from {_SLOWEST} to {_FASTEST}."
        elif abs(round(speed / _STEP) * _STEP - speed) > 1e-6:
            code, why = "SPEED_INCREMENT_INVALID", f"speed must be a multiple of {_STEP}."
        else:
            self.session.configure(speed=float(speed))
            await self.send("ConfigureSuccess", applied={"speed": speed})
            return
        await self.send("ConfigureFailure", code=code, field="speed", value=speed, description=why)

    async def say(self, event: Event) -> None:
        match event:
            case Started(turn):
                self._turn_samples = 0
                await self.send("SpeechStarted", speech_id=self._speech_id(turn))
            case Audio(turn, data):
                self._turn_samples += len(data) // (2 if self.speech.delivery.audio_format == RAW["linear16"] else 1)
                await self.socket.send_bytes(data)
            case Flushed(turn):
                await self._end_turn(turn)
            case Cleared():
                await self._tell_interrupted(event)

    async def finish(self) -> None:
        counts = dict.fromkeys(("total_input_character_count", "total_billable_character_count"), self._characters)
        await self.send("SessionMetadata", total_audio_duration_ms=self._finished_ms, **counts)
        await super().finish()

    async def _end_turn(self, turn: Turn) -> None:
        if turn.utterance is None:
            await self._warn("NO_SYNTHESIZABLE_TEXT", "The text does not contain speakable characters.")
        samples, self._turn_samples = self._turn_samples, 0
        self._characters, self._num_ended = self._characters + len(turn.text), turn.number
        self._finished_ms += self._ms(samples)
        metadata = self._metadata(self._speech_id(turn), samples=samples, characters=len(turn.text))
        await self.send("SpeechMetadata", **metadata, finish_reason=turn.finish_reason, **turn.usage.answer)

    async def _tell_interrupted(self, cleared: Cleared) -> None:
        """Report an interrupted turn. Continue counting from the client's offset, the actual playback position."""
        turn, spoken = cleared.heard, cleared.spoken
        assert turn is not None, "an interrupt requires a turn"
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


AURA = Dialect(
    "Deepgram",
    routes=(Route("POST /v1/speak", speak_text, "Speak a text (Deepgram Aura)"),),
    sockets=(("/v1/speak", AuraSocket),),
    sample=Sample(
        "/v1/speak?model=$voice&encoding=linear16&sample_rate=24000",
        messages=({"type": "Speak", "text": "$text"}, {"type": "Flush"}),
        clients=(
            'LiveKit:          deepgram.TTS(base_url="$url/v1/speak", api_key=KEY, model="$voice")',
            (
                'Pipecat:          DeepgramTTSService(base_url="$sockets", api_key=KEY, '
                'settings=DeepgramTTSService.Settings(voice="$voice"))'
            ),
            (
                'deepgram-sdk:     DeepgramClientEnvironment(base="$url", production="$sockets", '
                'agent="$sockets", agent_rest="$url")'
            ),
        ),
    ),
)
FLUX = Dialect(
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
