"""What every dialect needs: the loaded model, its voices, speech as an HTTP response or as a session."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from deployments.errors import InvalidRequest, PayloadTooLarge
from deployments.protocol import ModelInfo, ModelKind, PcmChunk, SynthesisRequest
from serve_app.api import catalogue, ignored_fields
from serve_app.api.chooser import ModelWish, choose
from serve_app.api.client_json import MAX_BODY_BYTES, parse_object
from serve_app.api.context import state_of
from serve_app.api.errors import BodyTooSlow, translate
from serve_app.api.request import SpeechBody, build_request, check_length, parse_speech, speaks_stored
from serve_app.api.request_log import RequestRecord
from serve_app.api.response import Kept, SpeechResponse, audio_body, event_body, start_marks
from serve_app.api.session import Session, silence
from serve_app.api.wish import Delivery, Wish, speech_headers
from serve_app.audio.formats import AudioFormat, check_bit_rate
from serve_app.config import ApiSettings
from serve_app.speech.characters import is_speakable
from serve_app.speech.live_text import LiveTexts
from serve_app.speech.models import Models
from serve_app.speech.word_times import WordTimes
from serve_app.voices.library import Voices
from serve_app.voices.record import StoredVoice

Wrap = Callable[[AsyncGenerator[bytes, None], WordTimes | None], AsyncGenerator[bytes, None]]

_NO_CLONES = "{} does not clone voices: load a Base checkpoint"
BODY_TIMEOUT_S = 30.0  # for a whole body to arrive


class SpeechService:
    """What every dialect goes through to speech: limits, checks and the log are the same for all of them."""

    def __init__(
        self,
        models: Models,
        settings: ApiSettings,
        *,
        live_texts: LiveTexts,
        voices: Voices,
    ) -> None:
        """`live_texts` holds the texts that are still being written, `voices` the stored voices."""
        self.models, self.settings, self.live_texts, self.voices = models, settings, live_texts, voices

    async def described(self) -> Sequence[ModelInfo]:
        """All models, the default first. Raises NotReady."""
        return await self.models.described()

    async def choose(self, body: SpeechBody, sent: Mapping[str, object]) -> ModelInfo:
        """The model that answers a request of these fields. An unknown model or, with several models, an unknown voice
        is an error. Raises InvalidRequest, ModelNotFound, NotReady.
        """
        models = await self.described()
        wanted = ModelWish(
            model=body.model,
            has_recording=body.ref_audio is not None or await self._is_stored(body.voice, models),
            task_type=sent.get("task_type"),
            voice=body.voice,
            instructions=body.instructions,
        )
        info = choose(wanted, models, self.settings, lenient=False)
        catalogue.check_model(body.model, info, self.settings)
        return info

    async def _is_stored(self, voice: str | None, models: Sequence[ModelInfo]) -> bool:
        """Whether a stored voice decides which of several models answers. A name of theirs, which most requests have,
        is looked up in what is known: to look at the store would cost each of them a round trip.
        """
        if len(models) == 1 or voice is None:
            return False
        is_theirs = any(catalogue.is_named(voice, info.voices) for info in models)
        return (self.voices.known(voice) if is_theirs else await self.voices.find(voice)) is not None

    @property
    def chosen_by(self) -> ignored_fields.Names:
        """Fields that have an effect only where several models are deployed."""
        return {"task_type": None} if len(self.models) > 1 else {}

    async def lenient_wish(
        self,
        sent: Mapping[str, object],
        names: ignored_fields.Names,
        *,
        delivery: Delivery,
        made: Mapping[str, object] | None = None,
        reasons: Mapping[str, str] | None = None,
    ) -> Wish:
        """The wish of a client of another service, which cannot know the models and voices here.

        An unknown model or voice becomes the default one, and `Wish.ignored` names it. Clients that know this server
        get `strict_wish` of dialects/openai_speech.py, which refuses unknown names.

        `sent`: the fields, flat as `ignored_fields.flat` returns them. `names`: the dialect's names of fields. `made`:
        fields of a SpeechBody that the dialect sets itself. `reasons`: why fields have no effect, by field. Raises
        InvalidRequest that names the field.
        """
        given = {**ignored_fields.renamed(sent, names), **(made or {})}
        model, bit_rate, called = given.pop("model", None), given.pop("bit_rate", None), given.pop("voice", None)
        name, models = called if isinstance(called, str) else None, await self.described()
        wanted = ModelWish(
            model=model if isinstance(model, str) else None,
            has_recording=given.get("ref_audio") is not None or await self._is_stored(name, models),
            task_type=sent.get("task_type"),
            voice=name,
            instructions=given.get("instructions"),
        )
        info, names = choose(wanted, models, self.settings, lenient=True), {**names, **self.chosen_by}
        found = dict(reasons or {})
        voice, reason = self._nearest(name, info)
        if called is not None and name is None:
            reason = "not a name"
        if reason is not None:
            found["voice"] = reason
        if model is not None and not catalogue.is_known(model, info, self.settings):
            found["model"] = f"the loaded model is {info.name}"
        if bit_rate is not None and not delivery.has_bit_rate:
            found["bit_rate"] = f"{delivery.audio_format} has none"
        given = {name: value for name, value in given.items() if value is not None}
        body = parse_speech({"input": "", "any_language": True, **given, "voice": voice})
        if info.kind is ModelKind.BASE and name is not None:
            body = body.model_copy(update={"voice": name})
        stored = await self.stored(body, info)
        if stored is not None:
            found.pop("voice", None)
        elif (stored := await self._default(body, info)) is not None:
            body = body.model_copy(update={"voice": stored.id})
            found |= {"voice": f"no such voice here, {stored.name} speaks"} if called is not None else {}
        body, is_tagged = tagged(body, stored, found)
        check_length("input", body.input, self.settings)
        delivery = replace(delivery, speed=body.speed, sample_rate=body.sample_rate or delivery.sample_rate)
        if delivery.bit_rate is not None:
            check_bit_rate(delivery.audio_format, delivery.bit_rate)
        without_effect = ignored_fields.find_ignored(sent, body, info, names, reasons=found, stored=stored)
        return Wish(info, body, delivery, without_effect, stored, is_tagged)

    async def _default(self, body: SpeechBody, info: ModelInfo) -> StoredVoice | None:
        """The stored voice of `api.default_voice`, for a request of a dialect that cannot know our names."""
        is_needed = info.kind is ModelKind.BASE and body.ref_audio is None
        return await self.voices.find(self.settings.default_voice) if is_needed else None

    async def voiced(self, wish: Wish, voice: str) -> Wish:
        """The same in another voice; `ignored` is about that voice only."""
        speaker, reason = self._nearest(voice, wish.info)
        body = wish.body.model_copy(update={"voice": voice if wish.info.kind is ModelKind.BASE else speaker})
        stored = await self.stored(body, wish.info)
        if stored is None and (default := await self._default(body, wish.info)) is not None:
            body, reason = body.model_copy(update={"voice": default.id}), f"no such voice here, {default.name} speaks"
            return replace(wish, body=body, ignored={"voice": reason}, stored=default)
        return replace(wish, body=body, ignored={"voice": reason} if reason and stored is None else {}, stored=stored)

    async def stored(self, body: SpeechBody, info: ModelInfo) -> StoredVoice | None:
        """The stored voice that a request means and the loaded model can speak with."""
        return await self.voices.find(body.voice) if speaks_stored(body, info) else None

    def check_voice(self, voice: str, info: ModelInfo) -> None:
        """Raises InvalidRequest where the loaded model has named voices, and not this one."""
        if info.voices and not catalogue.is_named(voice, info.voices) and self.voices.known(voice) is not None:
            raise InvalidRequest(f"voice: {voice[:80]!r} is a stored voice, {_NO_CLONES.format(info.name)}.", "voice")
        if info.voices:
            catalogue.resolve(voice, info.voices)

    def _nearest(self, voice: str | None, info: ModelInfo) -> tuple[str | None, str | None]:
        speaker, reason = catalogue.nearest(voice, info, self.settings)
        if reason is not None and info.kind is not ModelKind.BASE and self.voices.known(voice) is not None:
            reason = f"a stored voice, {_NO_CLONES.format(info.name)}"
        return speaker, reason

    def session(self, connection: HTTPConnection, wish: Wish, *, request_id: str, live: bool = True) -> Session:
        """Speech of one conversation, while it is written if `live`; see `Session`."""
        return Session(
            self.models,
            self.settings,
            wish,
            asker=state_of(connection),
            request_id=request_id,
            live_texts=self.live_texts if live else None,
            voices=self.voices,
        )

    async def respond(
        self, request: Request, wish: Wish, *, as_body: Wrap | None = None, content_type: str | None = None
    ) -> Response:
        """`wish.body.input` over HTTP; `as_body` makes another body of its audio and its words, of that type."""
        utterance = await self.utterance(request, wish)
        usage = state_of(request).record.usage
        usage.ignored = ignored_fields.entries(wish.ignored)
        kept = Kept(state_of(request).caller.name) if wish.delivery.whole else None
        if kept is not None:
            kept.expect(wish.body, wish.delivery, wish.info)
        make = event_body if wish.delivery.events else audio_body
        times = WordTimes(wish.body.input, wish.info, speed=wish.body.speed) if wish.body.word_timestamps else None
        stream = make(self.chunks(utterance, wish.info), wish.delivery.rendering(wish.info), usage, times, kept)
        if as_body is not None:
            stream = as_body(stream, times)
        headers = {
            **speech_headers(wish.delivery, wish.info),
            **ignored_fields.as_header(wish.ignored),
            **wish.take_header(),
        }
        if content_type is not None:
            headers["content-type"] = content_type
        return SpeechResponse(stream, headers, usage=usage, kept=kept)

    async def utterance(
        self, request: HTTPConnection, wish: Wish, *, record: RequestRecord | None = None
    ) -> SynthesisRequest:
        """The utterance of a request, or of a socket's message with its own `record`. Raises InvalidRequest."""
        record = record or state_of(request).record
        asked = await build_request(
            wish.body,
            wish.info,
            self.settings,
            voices=self.voices,
            request_id=record.request_id,
            client=state_of(request).caller.name,
        )
        state_of(request).upload.release()
        record.begin(
            asked.voice if wish.stored is None else wish.stored.id, wish.info.sample_rate * wish.delivery.speed
        )
        return start_marks(asked, record.received_ns) if self.settings.server_timing else asked

    def chunks(self, utterance: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        """The utterance's audio; a moment of silence where its text has nothing to speak."""
        return self.models.synthesize(utterance) if is_speakable(utterance.text) else _silent(info)


def tagged(body: SpeechBody, stored: StoredVoice | None, reasons: dict[str, str]) -> tuple[SpeechBody, bool]:
    """The body whose text has lost a tag that chooses a recording of the voice, and whether there was one; it chooses
    as `instructions` do, in whose place it comes. `reasons` learns where these had no effect.
    """
    style, text = (None, body.input) if stored is None else stored.tagged(body.input)
    if style is None:
        return body, False
    if body.instructions is not None:
        reasons["instructions"] = "a tag of the text chose the recording"
    return body.model_copy(update={"input": text, "instructions": style}), True


async def read_body(request: Request) -> bytes:
    """The body, given up as soon as it is too large or too slow, whatever its Content-Length says."""
    body, upload = bytearray(), state_of(request).upload
    try:
        async with upload.arriving(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise PayloadTooLarge(f"The body is larger than {MAX_BODY_BYTES} bytes.")
                await upload.grow(len(body))
    except TimeoutError:
        if upload.is_stalled:
            raise BodyTooSlow("The body stalled while others waited to send theirs: send it again.") from None
        raise BodyTooSlow(f"The body did not arrive within {BODY_TIMEOUT_S:g} seconds.") from None
    return bytes(body)


async def read_object(request: Request, service: SpeechService) -> dict[str, object]:
    """The JSON object that is the body. Raises InvalidRequest, and Overloaded where parsing it would be in vain."""
    content = await read_body(request)
    service.models.check_room(state_of(request).caller.name)
    return parse_object(content)


async def _silent(info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
    yield silence(info)


async def refuse_handshake(socket: WebSocket, error: Exception, *, reason_header: str | None = None) -> None:
    """Answers the handshake of a WebSocket with a status; `reason_header` says why where clients show a header."""
    reply = translate(error)
    state_of(socket).record.error = reply.code
    response = reply.response()
    if reason_header is not None:
        response.headers[reason_header] = reply.message.encode("ascii", "replace").decode().replace("\n", " ")
    await socket.send_denial_response(response)


def text_of(fields: Mapping[str, object], name: str = "text") -> str:
    """The text of a message or a body. Raises InvalidRequest."""
    text = fields.get(name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} is required, as a string.", name, "missing_required_parameter")
    return text


def choice(param: str, value: str, choices: Mapping[str, AudioFormat]) -> AudioFormat:
    """The format that a dialect calls `value`. Raises InvalidRequest with the valid names."""
    if value not in choices:
        raise InvalidRequest(f"{param}: {value[:40]!r} is none of {', '.join(choices)}.", param)
    return choices[value]
