"""ElevenLabs' WebSocket API: contexts (multi-stream-input), one text (stream-input), and dialogue contexts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from starlette.websockets import WebSocket

from deployments.errors import InvalidRequest
from serve_app.api.error_replies import ErrorReply, translate
from serve_app.api.parsing import field_names
from serve_app.api.parsing.client_input import plain_number, switch
from serve_app.api.resolve import ignored_fields
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Dialect, Sample
from serve_app.extensions.elevenlabs.elevenlabs import (
    LOCATORS,
    NAMES,
    beside_text,
    characters,
    dialogue,
    encoded,
    located,
    request_in_voice,
    speech_request,
    unknown,
)
from serve_app.extensions.live.connection import HandshakeConnection
from serve_app.extensions.live.contexts import MAX_CONTEXTS, ContextConnection, NamedSession
from serve_app.extensions.live.turns import Audio, Done, Event, Failed, Flushed, Rest, Words
from serve_app.speech.observers import Word, marked

_ONLY = ""  # name of the only context of stream-input
_SPEED = "voice_settings.speed"
_FIELDS: field_names.Names = dict.fromkeys(
    ("text", "inputs", "context_id", "flush", "close_context", "close_socket", "keep_alive", LOCATORS, _SPEED)
)


@dataclass(slots=True, eq=False)
class _Context(NamedSession):
    is_ending: bool = False  # whether the last message was an empty flush
    is_draining: bool = False
    words: list[Word] = field(default_factory=list)  # to send with the next audio
    clock_ms: float = 0.0  # origin of the reported times


class _Contexts(ContextConnection[_Context], HandshakeConnection):
    """Connection of multi-stream-input. After an empty flush, `close_context` ends a context after its last text.

    If there was no flush, `close_context` interrupts the context.
    """

    kind = _Context
    names: ClassVar[field_names.Names] = {**NAMES, "sync_alignment": None}

    def __init__(self, socket: WebSocket, service: SpeechService) -> None:
        super().__init__(socket, service)
        self._early: dict[str, ignored_fields.Reasons] = {}  # reasons for contexts that have no text yet
        self._is_cumulative = switch(socket.query_params, "sync_alignment")

    @classmethod
    async def speech_request(cls, socket: WebSocket, service: SpeechService) -> SpeechRequest:
        voice = socket.path_params.get("voice_id")
        return await speech_request(
            service, {"text": ""}, socket.query_params, voice=voice, words=True, names=cls.names
        )

    async def obey(self, fields: dict[str, object]) -> None:
        name = self.name_of(fields, _ONLY)
        if switch(fields, "close_socket"):
            await self.end()
        elif switch(fields, "close_context"):
            await self._close(name)
        else:
            await self._write(name, fields)

    async def tell_error(self, reply: ErrorReply) -> None:
        await self._send_error("", reply)

    def _text(self, fields: Mapping[str, object]) -> str:
        text = fields.get("text", "")
        if not isinstance(text, str):
            raise InvalidRequest("text must be a string.", "text")
        return text

    async def _write(self, name: str, fields: Mapping[str, object]) -> None:
        text, flush = self._text(fields), switch(fields, "flush")
        context = self.find(name)
        if context.is_draining if context else not text:  # text after the end, or a keep-alive message
            reasons = _reasons(fields, {_SPEED: "send it with the first text"})
            if context:
                context.reasons |= reasons
            elif reasons and (name in self._early or len(self._early) < MAX_CONTEXTS):
                self._early[name] = self._early.get(name, {}) | reasons
            return
        context = context or await self._open(name, fields)
        context.session.append(text)
        if flush and context.session.is_writing:
            context.session.flush()
        if flush and not text.strip():
            context.is_ending = True
        elif text:
            context.is_ending = False

    async def _open(self, name: str, fields: Mapping[str, object]) -> _Context:
        speech = await self._speech_for(name, fields)
        context = await self.open(name, speech, self._early.get(name, {}))
        self._early.pop(name, None)
        reasons = {} if speech is self.speech else speech.ignored
        settings = fields.get("voice_settings")
        speed = settings.get("speed") if isinstance(settings, Mapping) else None
        speed = plain_number(speed) if isinstance(speed, str) else speed
        if isinstance(speed, int | float) and 0.25 <= speed <= 4:
            context.session.configure(speed=float(speed))
        elif speed is not None:
            reasons = {**reasons, _SPEED: "must be a number from 0.25 to 4"}
        context.reasons |= _reasons(fields, reasons)
        return context

    async def _speech_for(self, name: str, fields: Mapping[str, object]) -> SpeechRequest:
        if LOCATORS not in fields:
            return self.speech
        reasons: dict[str, str] = {}
        resolver, words = self.service.resolver, await located(self.service, fields[LOCATORS], reasons)
        body = self.speech.body.model_copy(update={"lexicon": words})
        spoken, unread = await resolver.read_text(body, self.speech.info, self.speech.voice.stored)
        return replace(self.speech, body=body, spoken=spoken, ignored=reasons | unread)

    async def _close(self, name: str) -> None:
        if (context := self.find(name)) is None:
            return
        if context.is_ending and not context.is_draining:
            context.is_draining = True
            context.session.close()
            return
        await self.cancel(name)
        await self._send_final(name, {})

    async def say_in(self, context: _Context, event: Event) -> None:
        match event:
            case Words():
                context.words += event.in_session()
            case Audio(_, data) | Rest(data):
                await self._send_audio(context, data)
            case Flushed() if context.words:
                await self._send_audio(context, b"")
            case InvalidRequest() as refused:
                await self._send_error(context.name, translate(refused))
            case Failed(error):
                await self._send_error(context.name, self.failure(error, self.request_id))
                await self._send_final(context.name, context.notes())
            case Done(reason, answer):
                await self._send_final(context.name, {"finish_reason": reason, **answer, **context.notes()})

    async def _send_audio(self, context: _Context, audio: bytes) -> None:
        timed = {**self._timed(context, audio), "contextId": context.name, "isFinal": None}
        await self.socket.send_json({**timed, **context.notes()})

    def _timed(self, context: _Context, audio: bytes) -> dict[str, object]:
        """Return audio and new word times. Without `sync_alignment`, times are relative to the last message's end."""
        mark = marked(context.words)
        chars, starts_ms, durations_ms = _take_alignment(context)
        timed = {"chars": chars, "charStartTimesMs": starts_ms, "charDurationsMs": durations_ms} if chars else None
        if chars and not self._is_cumulative:
            context.clock_ms += starts_ms[-1] + durations_ms[-1]
        return {"audio": encoded(audio), "alignment": timed, "normalizedAlignment": timed, **mark}

    async def _send_final(self, name: str, notes: Mapping[str, object]) -> None:
        await self.socket.send_json({"contextId": name, "isFinal": True, **notes})

    async def _send_error(self, name: str, reply: ErrorReply) -> None:
        await self.socket.send_json({"contextId": name or None, "error": reply.message, "code": reply.code})


class _OneText(_Contexts):
    """Connection of stream-input. After an empty text, the server speaks the remaining text and closes the socket."""

    async def obey(self, fields: dict[str, object]) -> None:
        text = self._text(fields)
        await self._write(_ONLY, {**fields, "text": text})
        if not text and not switch(fields, "flush"):  # closes once all text has been spoken
            context = self.find(_ONLY) or await self._open(_ONLY, {})
            context.is_draining = True
            context.session.close()

    async def _send_audio(self, context: _Context, audio: bytes) -> None:
        await self.socket.send_json({**self._timed(context, audio), "isFinal": None, **context.notes()})

    async def _send_final(self, name: str, notes: Mapping[str, object]) -> None:
        await self.socket.send_json({"isFinal": True, **notes})
        await self.end()


class _Dialogues(_Contexts):
    """Connection of text-to-dialogue. The first input's voice speaks the entire context. Field names use snake case."""

    names = NAMES

    async def opened(self) -> None:
        delivery = self.speech.delivery
        sample_bits = 8 if delivery.audio_format in (AudioFormat.MULAW, AudioFormat.ALAW) else 16
        self._bit_rate = delivery.bit_rate or sample_bits * delivery.rate(self.speech.info)

    async def _speech_for(self, name: str, fields: Mapping[str, object]) -> SpeechRequest:
        _, voice = dialogue(fields.get("inputs"))
        return await request_in_voice(self.service.resolver, self.speech, voice) if voice else self.speech

    def _text(self, fields: Mapping[str, object]) -> str:
        inputs = fields.get("inputs")
        return "".join(dialogue([part])[0] for part in inputs) if isinstance(inputs, list) else ""

    async def _send_audio(self, context: _Context, audio: bytes) -> None:
        """Send audio and word times. The times are relative to the start of the audio in this message."""
        mark = marked(context.words)
        chars, starts_ms, durations_ms = _take_alignment(context)
        timed = {"chars": chars, "char_start_times_ms": starts_ms, "char_durations_ms": durations_ms}
        context.clock_ms += 8000 * len(audio) / self._bit_rate
        alignment = {"alignment": timed, **mark} if chars else {}
        said = {"context_id": context.name, "audio": encoded(audio), **alignment}
        await self.socket.send_json({**said, **context.notes()})

    async def _send_final(self, name: str, notes: Mapping[str, object]) -> None:
        await self.socket.send_json({"context_id": name, "is_final": True, **notes})

    async def _send_error(self, name: str, reply: ErrorReply) -> None:
        said = {"error": reply.code, "message": reply.message, "code": reply.code}
        await self.socket.send_json({"context_id": name or None, **said})


def _take_alignment(context: _Context) -> tuple[list[str], list[int], list[int]]:
    """Return the characters of the words to report, and their starts and durations in ms. Clear these words."""
    chars, starts_s, ends_s = characters(context.words)
    context.words = []
    clock_ms = round(context.clock_ms)
    starts_ms, ends_ms = ([round(1000 * time_s) - clock_ms for time_s in times_s] for times_s in (starts_s, ends_s))
    return chars, starts_ms, [end - start for start, end in zip(starts_ms, ends_ms, strict=True)]


def _reasons(fields: Mapping[str, object], reasons: Mapping[str, str]) -> ignored_fields.Reasons:
    """Return the ignored fields of a message. `reasons` contains the reasons already known."""
    sent = field_names.flat(fields, _FIELDS)
    ignored = {field: reason for field, reason in reasons.items() if field != _SPEED or field in sent}
    ignored |= beside_text(sent) | _unheard(fields.get("inputs"))
    return ignored_fields.with_unknown(sent, _FIELDS, ignored)


def _unheard(inputs: object) -> dict[str, str]:
    """Return the ignored fields in a message's inputs, and why they are ignored."""
    parts = [part for part in inputs if isinstance(part, Mapping)] if isinstance(inputs, list) else []
    voices = {str(part.get("voice_id")) for part in parts}
    reason = {"inputs.voice_id": "the voice of the first input speaks the context"} if len(voices) > 1 else {}
    return {**unknown(inputs), **reason}


DIALECT = Dialect(
    "ElevenLabs",
    sockets=(
        ("/v1/text-to-speech/{voice_id}/multi-stream-input", _Contexts),
        ("/v1/text-to-speech/{voice_id}/stream-input", _OneText),
        ("/v1/text-to-dialogue/multi-stream-input", _Dialogues),
    ),
    key_parameters=("single_use_token",),
    sample=Sample(
        "/v1/text-to-speech/$voice/multi-stream-input?output_format=pcm_24000",
        audio_field="audio",
        messages=(
            {"text": " ", "context_id": "check"},
            {"text": "$text ", "context_id": "check", "flush": True},
            {"text": "", "context_id": "check", "flush": True},
            {"context_id": "check", "close_context": True},
        ),
        clients=(
            'LiveKit:          elevenlabs.TTS(base_url="$url/v1", api_key=KEY, voice_id="$voice")',
            (
                'Pipecat:          ElevenLabsTTSService(url="$sockets", api_key=KEY, '
                'settings=ElevenLabsTTSService.Settings(voice="$voice"))'
            ),
            'elevenlabs:       ElevenLabs(base_url="$url", api_key=KEY)',
        ),
    ),
)
