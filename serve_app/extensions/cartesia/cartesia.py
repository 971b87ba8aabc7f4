"""Cartesia's API: contexts over a WebSocket, a transcript as bytes or events over HTTP, and voices."""

import base64
import re
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.errors import InvalidRequest, NotFound
from deployments.protocol import FinishReason
from serve_app.api import catalogue
from serve_app.api.context import state_of
from serve_app.api.error_replies import ErrorReply, translate
from serve_app.api.parsing import field_names
from serve_app.api.parsing.client_input import format_named, number, switch, text_of
from serve_app.api.parsing.forms import read_form
from serve_app.api.request_record import Usage
from serve_app.api.resolve import ignored_fields
from serve_app.api.resolve.speech_request import EVENT_STREAM, Delivery, SpeechRequest
from serve_app.api.responses.events import named_event
from serve_app.api.responses.listing import STARTING_AFTER, Paging, json_in_thread
from serve_app.api.responses.respond import respond
from serve_app.api.responses.speech_response import StreamedFormat
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Charge, Dialect, Route, Sample
from serve_app.extensions.live.contexts import ContextConnection, NamedSession
from serve_app.extensions.live.turns import Audio, Done, Event, Failed, Flushed, Rest, Words
from serve_app.extensions.voices.library import voices_of
from serve_app.extensions.voices.listing import find_voice
from serve_app.extensions.voices.stored_voice import Details, SentRecording, StoredLexicon
from serve_app.extensions.voices.voice_store import StoreFailed
from serve_app.speech.observers import Word, WordSource, marked
from serve_app.text.languages import language_code, language_name

RAW = {
    "pcm_s16le": AudioFormat.PCM,
    "pcm_f32le": AudioFormat.FLOAT,
    "pcm_mulaw": AudioFormat.MULAW,
    "pcm_alaw": AudioFormat.ALAW,
}
_CONTAINERS = {"wav": AudioFormat.WAV, "mp3": AudioFormat.MP3}
_DICTIONARY = "pronunciation_dict_id"
_NAMES: field_names.Names = {
    "transcript": "input",
    "model_id": "model",
    "voice": "voice",
    "voice.id": "voice",
    "voice.mode": None,
    "language": "language",
    "output_format.container": None,
    "output_format.encoding": None,
    "output_format.sample_rate": "sample_rate",
    "output_format.bit_rate": "bit_rate",
    "generation_config.speed": "speed",
    "generation_config.emotion": "instructions",
    "add_timestamps": "word_timestamps",
    _DICTIONARY: None,
}
_SOCKET_NAMES: field_names.Names = {**_NAMES, **dict.fromkeys(("context_id", "continue", "flush", "cancel"))}
_CLONED = ("clip", "name", "language", "description", "consent", "ref_text", "reference_text", "transcript", "prepare")
_PHONEMES = re.compile(r"<<[^<>]{1,200}>>")


async def speak_bytes(service: SpeechService, request: Request) -> Response:
    """Speak `transcript`, and respond with audio bytes."""
    fields = await service.read_fields(request)
    text_of(fields, "transcript")
    overrides = {"word_timestamps": False}
    reasons = {"add_timestamps": "use /tts/sse"} if switch(fields, "add_timestamps") else {}
    return await respond(service, request, await _speech_request(service, fields, overrides=overrides, reasons=reasons))


async def speak_events(service: SpeechService, request: Request) -> Response:
    """Speak `transcript`, and respond with server-sent events in the same format as the WebSocket's messages."""
    fields = await service.read_fields(request)
    text_of(fields, "transcript")
    speech = await _speech_request(service, fields)
    usage = state_of(request).record.usage
    events = StreamedFormat(EVENT_STREAM, lambda audio, times: _events(audio, times, usage))
    return await respond(service, request, speech, events)


async def list_voices(service: SpeechService, limit: str = "", starting_after: str = "") -> Response:
    """Return all voices, or one page of them if the client sends a `limit`."""
    voices = await catalogue.all_voices(await service.models.infos(), voices_of(service))
    paging = Paging(limit, starting_after, STARTING_AFTER)
    page, more = catalogue.page_of_voices(voices, paging, service.resolver.voices)
    return await json_in_thread(
        lambda: {"data": list(map(_voice, page)), "has_more": more is not None, "next_page": more}
    )


async def show_voice(service: SpeechService, voice_id: str) -> dict[str, object]:
    """Return one voice. Raises InvalidRequest with the valid names if the voice is unknown."""
    return _voice(await find_voice(voice_id, service.models, voices_of(service)))


async def clone_voice(service: SpeechService, request: Request) -> Response:
    """Store a voice from a recording in `clip`."""
    form = await read_form(request)
    clips = form.files_of("clip")
    if len(clips) != 1:
        raise InvalidRequest("clip is required. Send one recording.", "clip", "missing_required_parameter")
    details = Details(
        form.required("name"),
        language=form.text("language"),
        description=form.text("description") or "",
        consent=form.text("consent"),
        provenance="cartesia",
    )
    text = form.text("ref_text", "reference_text", "transcript")
    recording = SentRecording(clips[0].data, text, prepare=form.preparation())
    voice = await voices_of(service).add(details, [recording], field="clip")
    without_effect = ignored_fields.with_unknown([*form.fields, "clip"], _CLONED, {})
    answer = {**_voice(catalogue.stored_voice(voice)), "takes": [take.as_json() for take in voice.takes]}
    return JSONResponse(answer, headers=ignored_fields.as_header(without_effect))


async def remove_voice(service: SpeechService, voice_id: str) -> Response:
    """Delete a stored voice."""
    await voices_of(service).remove(await voices_of(service).get(voice_id))
    return Response(status_code=204)


def _voice(voice: catalogue.Voice) -> dict[str, object]:
    is_stored = voice.type == "stored"
    return {
        "id": voice.id,
        "name": voice.name,
        "language": language_code(language_name(voice.language)) or "en",
        "description": voice.description,
        "gender": {"female": "feminine", "male": "masculine"}.get(voice.gender, "gender_neutral"),
        "tagline": "",
        "locales": [],
        "access": "private" if is_stored else "public",
        "visibility": "owner" if is_stored else "all",
        "is_owner": is_stored,
        "is_public": not is_stored,
        "created_at": "1970-01-01T00:00:00Z",
    }


async def _speech_request(
    service: SpeechService,
    fields: Mapping[str, object],
    names: field_names.Names = _NAMES,
    *,
    overrides: Mapping[str, object] | None = None,
    reasons: Mapping[str, str] | None = None,
) -> SpeechRequest:
    """Create a request from the fields of a message or body. Raises InvalidRequest."""
    sent = field_names.flat(fields, names)
    _check_phonemes(sent.get("transcript"))
    container = str(sent.get("output_format.container", "raw")).strip().lower()
    ignored = dict(reasons or {})
    if _DICTIONARY in sent:
        overrides = {**(overrides or {}), "lexicon": await _words(service, sent[_DICTIONARY], ignored)}
    audio_format = format_named("output_format.encoding", str(sent.get("output_format.encoding", "pcm_s16le")), RAW)
    if container != "raw" and format_named("output_format.container", container, _CONTAINERS) is AudioFormat.MP3:
        audio_format = AudioFormat.MP3
        if "output_format.encoding" in sent:
            ignored["output_format.encoding"] = "mp3 is the encoding"
    if sent.get("voice.mode", "id") != "id":
        ignored["voice.mode"] = "only id is supported"
    bit_rate = number("output_format.bit_rate", sent.get("output_format.bit_rate"))
    delivery = Delivery(audio_format, bit_rate=None if bit_rate is None else int(bit_rate), in_wav=container == "wav")
    return await service.resolver.lenient_request(sent, names, delivery=delivery, overrides=overrides, reasons=ignored)


async def _words(service: SpeechService, dictionary_id: object, reasons: dict[str, str]) -> dict[str, str]:
    """Return the words in a pronunciation dictionary. If it cannot be used, add the reason to `reasons`."""
    try:
        return (await voices_of(service).get_other(StoredLexicon, str(dictionary_id))).words
    except (NotFound, StoreFailed) as error:
        reasons[_DICTIONARY] = str(error)
        return {}


def _check_phonemes(text: object) -> None:
    """Raise InvalidRequest if the text contains phonemes in angle brackets."""
    if isinstance(text, str) and (phonemes := _PHONEMES.search(text)):
        reason = "phonemes are not supported. Write the word or a respelling"
        message = f"transcript: {phonemes[0][:40]!r} at character {phonemes.start()}: {reason}."
        raise InvalidRequest(message, "transcript", "phonemes_not_supported")


def _chunk(context_id: str, audio: bytes) -> dict[str, object]:
    data = base64.b64encode(audio).decode()
    step = {"status_code": 206, "done": False, "step_time": 0.0}
    return {"type": "chunk", "context_id": context_id, "data": data, **step}


def _done(context_id: str, reason: FinishReason | None, answer: Mapping[str, object]) -> dict[str, object]:
    step = {"status_code": 200, "done": True, "finish_reason": reason}
    return {"type": "done", "context_id": context_id, **step, **answer}


def _error(context_id: str | None, reply: ErrorReply) -> dict[str, object]:
    said = {"title": reply.code, "error_code": reply.code, "message": reply.message, "error": reply.message}
    return {"type": "error", "context_id": context_id, "status_code": reply.status, "done": True, **said}


def _timestamps(context_id: str, words: Sequence[Word]) -> dict[str, object]:
    entries = {
        "words": [word.text for word in words],
        "start": [round(word.start_s, 3) for word in words],
        "end": [round(word.end_s, 3) for word in words],
    }
    step = {"status_code": 206, "done": False}
    return {"type": "timestamps", "context_id": context_id, "word_timestamps": entries, **step, **marked(words)}


async def _events(
    audio: AsyncGenerator[bytes, None], times: WordSource | None, usage: Usage
) -> AsyncGenerator[bytes, None]:
    context_id = secrets.token_hex(8)
    has_sent = False
    try:
        async with aclosing(audio):
            async for data in audio:
                has_sent = True
                yield named_event(_chunk(context_id, data))
                if times is not None and (words := times.take()):
                    yield named_event(_timestamps(context_id, words))
    except Exception as error:
        if has_sent:
            yield named_event(_error(context_id, translate(error)))
        raise
    if times is not None and (words := times.take()):
        yield named_event(_timestamps(context_id, words))
    yield named_event(_done(context_id, usage.finish_reason, usage.answer))


@dataclass(slots=True, eq=False)
class _Context(NamedSession):
    flushes: set[int] = field(default_factory=set)  # turns that the client asked to end


class CartesiaSocket(ContextConnection[_Context]):
    """Connection of `WS /tts/websocket`."""

    kind = _Context

    async def obey(self, fields: dict[str, object]) -> None:
        name = self.name_of(fields, "") or secrets.token_hex(8)
        if switch(fields, "cancel"):
            await self.cancel(name)
            return
        try:
            await self._write(name, fields)
        except InvalidRequest as error:
            await self.socket.send_json(_error(name, translate(error)))

    async def tell_error(self, reply: ErrorReply) -> None:
        await self.socket.send_json(_error(None, reply))

    async def _write(self, name: str, fields: dict[str, object]) -> None:
        text = text_of(fields, "transcript")
        flush, goes_on = switch(fields, "flush"), switch(fields, "continue")
        _check_phonemes(text)
        if (context := self.find(name)) is None:
            speech = await _speech_request(self.service, fields, _SOCKET_NAMES, overrides={"input": ""})
            context = await self.open(name, speech, speech.ignored)
        context.session.append(text)
        if flush:
            context.flushes.add(context.session.flush().number)
        if not goes_on:
            context.session.close()

    async def say_in(self, context: _Context, event: Event) -> None:
        name = context.name
        match event:
            case Audio(_, data) | Rest(data):
                await self.socket.send_json(_chunk(name, data) | context.notes())
            case Words():
                await self.socket.send_json(_timestamps(name, event.in_session()))
            case Flushed(turn) if turn.number in context.flushes:
                context.flushes.discard(turn.number)
                flushed = {"type": "flush_done", "flush_done": True, "flush_id": turn.number}
                await self.socket.send_json({**flushed, "context_id": name, "status_code": 206, "done": False})
            case InvalidRequest() as refused:
                await self.socket.send_json(_error(name, translate(refused)) | {"done": False})
            case Failed(error):
                await self.socket.send_json(_error(name, self.failure(error, self.request_id)) | context.notes())
            case Done(reason, answer):
                await self.socket.send_json(_done(name, reason, answer) | context.notes())


_OUTPUT = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24000}
DIALECT = Dialect(
    "Cartesia",
    routes=(
        Route("POST /tts/bytes", speak_bytes, "Speak a text (Cartesia)"),
        Route("POST /tts/sse", speak_events, "Speak a text as events (Cartesia)"),
        Route("GET /voices", list_voices, "List voices (Cartesia)", charge=Charge.NOTHING),
        Route("GET /voices/", list_voices, charge=Charge.NOTHING),
        Route("GET /voices/{voice_id}", show_voice, "Show a voice (Cartesia)"),
        Route("POST /voices/clone", clone_voice, "Store a voice (Cartesia)"),
        Route("DELETE /voices/{voice_id}", remove_voice, "Delete a stored voice (Cartesia)"),
    ),
    sockets=(("/tts/websocket", CartesiaSocket),),
    key_headers=("x-api-key",),
    key_parameters=("access_token",),
    sample=Sample(
        "/tts/websocket",
        audio_field="data",
        messages=(
            {"model_id": "sonic-3", "voice": {"mode": "id", "id": "$voice"}, "output_format": _OUTPUT}
            | {"context_id": "check", "transcript": "$text", "continue": False},
        ),
        clients=(
            'LiveKit:          cartesia.TTS(base_url="$url", api_key=KEY, voice="$voice")',
            (
                'Pipecat:          CartesiaTTSService(url="$sockets/tts/websocket", api_key=KEY, '
                'settings=CartesiaTTSService.Settings(voice="$voice"))'
            ),
            'cartesia:         Cartesia(base_url="$url", websocket_base_url="$sockets", api_key=KEY)',
        ),
    ),
)
