"""`POST /v1/audio/voices/design`: three candidates for a voice that is described in words. `POST /v1/audio/voices` with
`design` locks one.
"""

import asyncio
import base64
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, fields, replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.errors import InvalidRequest
from deployments.protocol import FinishReason, ModelKind, Sampling
from serve_app.api import catalogue
from serve_app.api.context import state_of
from serve_app.api.parsing import field_names
from serve_app.api.request_record import Usage
from serve_app.api.resolve import ignored_fields
from serve_app.api.resolve.make_request import lenient_request
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest
from serve_app.api.responses.speech_response import while_connected
from serve_app.api.responses.whole_audio import ByteQuota
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Dialect, Route
from serve_app.extensions.designs.designs import LONGEST_S, SHORTEST_S, Description, DesignedSpeech, keep
from serve_app.extensions.models.model_choice import not_deployed
from serve_app.extensions.voices.opening import voices_of
from serve_app.extensions.voices.stored_voice import StoredDesign
from serve_app.text.languages import language_name

Json = dict[str, object]

NUM_CANDIDATES = 3
_MOST_CHARS = 500  # of the text: more takes longer than LONGEST_S to say
_BYTES_PER_S = 3 * 48_000 * 2  # of a candidate: its samples, and its audio as the client has it
_NAMES: field_names.Names = {
    "instructions": "instructions",
    "description": "instructions",
    "text": "input",
    "input": "input",
    **{name: name for name in ("model", "language", "any_language", "seed", "response_format", "sample_rate")},
    "ignore_eos": "ignore_eos",
    **{option.name: option.name for option in fields(Sampling)},
}
# Five to nine seconds of everyday words each, for requests without a text.
_TEXTS = {
    "english": "Hello, it is good to hear from you. Take a seat by the window, and I will tell you about my day.",
    "german": "Hallo, schön, von dir zu hören. Setz dich ans Fenster, dann erzähle ich dir, wie mein Tag gewesen ist.",
    "french": "Bonjour, quel plaisir de vous entendre. Asseyez-vous là, et je vous raconterai ma journée.",
    "spanish": "Hola, me alegro de saber de ti. Siéntate junto a la ventana y te contaré cómo ha sido mi día.",
    "italian": "Ciao, è bello sentirti. Siediti vicino alla finestra e ti racconto com'è andata la mia giornata.",
    "portuguese": "Olá, que bom ter notícias suas. Sente-se perto da janela e eu conto como foi o meu dia.",
    "russian": "Здравствуйте, как приятно вас слышать. Садитесь у окна, и я расскажу вам, как прошёл мой день.",  # noqa: RUF001
    "chinese": "你好，很高兴听到你的消息。请坐到窗边，我来告诉你我今天过得怎么样。",  # noqa: RUF001
    "japanese": "こんにちは、お元気ですか。窓のそばに座ってください。今日の出来事をお話しします。",
    "korean": "안녕하세요, 목소리를 들으니 반갑습니다. 창가에 앉으세요, 오늘 하루가 어땠는지 이야기해 드릴게요.",
}
_FAULTS = {
    FinishReason.EARLY: "it ended before its text",
    **dict.fromkeys((FinishReason.SILENCE, FinishReason.LOOP, FinishReason.RUNAWAY), "it missed its end"),
    FinishReason.LENGTH: f"longer than {LONGEST_S:g} s",
}


@dataclass(frozen=True, slots=True)
class Candidates:
    """What is there to hear."""

    text: str
    made: list[tuple[StoredDesign, bytes]]  # with its audio as the client wants it
    left_out: list[Json]  # the others, with the reason


async def design_voice(service: SpeechService, request: Request) -> Response:
    """Speaks a text with three voices of one description. Each can be locked within an hour."""
    sent = await service.read_fields(request)
    overrides = {"any_language": sent.get("any_language", False)}
    speech = await speech_request(
        service, sent, _NAMES, delivery=Delivery(AudioFormat.MP3, whole=True), overrides=overrides
    )
    if isinstance(model := sent.get("model"), str):
        catalogue.check_model(model, speech.info, service.settings)
    speech = replace(
        speech, delivery=replace(speech.delivery, audio_format=speech.body.response_format or AudioFormat.MP3)
    )
    result = await candidates(service, request, speech)
    entries = [_candidate(design, audio, speech) for design, audio in result.made]
    answer = {"object": "list", "model": speech.info.name, "description": speech.body.instructions, "text": result.text}
    body = {**answer, "candidates": entries, "left_out": result.left_out}
    return JSONResponse(body, headers=ignored_fields.as_header(speech.ignored))


def _candidate(design: StoredDesign, audio: bytes, speech: SpeechRequest) -> Json:
    return {
        "id": design.id,
        "object": "audio.voice_design",
        "seed": design.seed,
        "seconds": design.take.seconds,
        "expires_at": design.expires_at,
        "media_type": speech.delivery.content_type(speech.delivery.rate(speech.info)),
        "audio": base64.b64encode(audio).decode(),
    }


async def speech_request(
    service: SpeechService,
    sent: Mapping[str, object],
    names: field_names.Names,
    *,
    delivery: Delivery,
    overrides: Mapping[str, object] | None = None,
) -> SpeechRequest:
    """The request for a model that designs voices, made as by `lenient_request`; a request without a text gets ours.

    Raises InvalidRequest where no such model is deployed.
    """
    models = await service.models.infos()
    if all(info.kind is not ModelKind.VOICE_DESIGN for info in models):
        raise not_deployed(ModelKind.VOICE_DESIGN, models, "Designing a voice")
    design_fields: Json = {**dict.fromkeys(service.offer.further_fields, "VoiceDesign"), **sent}
    speech = await lenient_request(service.offer, design_fields, names, delivery=delivery, overrides=overrides)
    if speech.info.kind is not ModelKind.VOICE_DESIGN:
        raise InvalidRequest(f"model: {speech.info.name} designs no voices, it is of kind {speech.info.kind}.", "model")
    body = speech.body
    if not any(name in sent for name, ours in names.items() if ours == "input"):
        text = _TEXTS.get(language_name(body.language), _TEXTS["english"])
        body = body.model_copy(update={"input": text})
    if len(body.input) > _MOST_CHARS:
        message = f"text has {len(body.input)} characters: a candidate says {_MOST_CHARS} at most."
        raise InvalidRequest(message, "text", "string_above_max_length")
    spoken, _ = await service.offer.read_text(service.offer, body, speech.info, speech.stored)
    return replace(speech, body=body, spoken=spoken)


async def candidates(service: SpeechService, request: Request, speech: SpeechRequest) -> Candidates:
    """Speaks them, all at once, and keeps them for an hour. Raises InvalidRequest where none can be used."""
    await voices_of(service).all_of(StoredDesign)  # raises where nothing could be kept
    caller = state_of(request).caller
    for _ in range(NUM_CANDIDATES - 1):  # the door has counted one
        caller.count_request()
    with ByteQuota(caller.name) as quota:
        quota.hold(int(NUM_CANDIDATES * LONGEST_S * _BYTES_PER_S))
        spoken = await while_connected(_speak_all(service, request, speech), request.receive)
        usable = [design for design, fault in spoken if fault is None]
        if not usable:
            why = "; ".join(str(fault) for _, fault in spoken)
            raise InvalidRequest(f"text: no candidate can be used ({why}): send another text.", "text", "design_failed")
        language = language_name(speech.body.language)
        description = Description(
            speech.body.instructions or "", speech.info.name, None if language == "auto" else language
        )
        kept_designs = await keep(voices_of(service), usable, description)
        audio = [await _rendered(design, speech) for design in usable]
    left_out: list[Json] = [{"seed": design.seed, "reason": fault} for design, fault in spoken if fault is not None]
    return Candidates(usable[0].text, list(zip(kept_designs, audio, strict=True)), left_out)


async def _speak_all(
    service: SpeechService, request: Request, speech: SpeechRequest
) -> list[tuple[DesignedSpeech, str | None]]:
    """Each, and why it is of no use if it is of none."""
    speaking = [asyncio.create_task(_speak(service, request, speech, number)) for number in range(NUM_CANDIDATES)]
    try:
        return await asyncio.gather(*speaking)
    finally:
        for task in speaking:
            task.cancel()
        await asyncio.wait(speaking)


async def _speak(
    service: SpeechService, request: Request, speech: SpeechRequest, number: int
) -> tuple[DesignedSpeech, str | None]:
    most = int(LONGEST_S / speech.info.frame_s) + 1  # the last one is the end of speech
    max_new_tokens = speech.body.sampling.max_new_tokens
    changes: Json = {"max_new_tokens": most if max_new_tokens is None else min(max_new_tokens, most)}
    if speech.body.seed is not None:
        changes["seed"] = (speech.body.seed + number) % 2**64
    utterance = (
        await service.begin_utterance(request, replace(speech, body=speech.body.model_copy(update=changes)))
    ).utterance
    utterance = utterance.changed(request_id=f"{utterance.synthesis.request_id}-{number + 1}")
    usage, pcm = Usage(), bytearray()
    async with aclosing(service.models.of(utterance).speak(utterance, speech.info)) as chunks:
        async for chunk in chunks:
            usage.add(chunk)
            pcm += chunk.pcm
    state_of(request).record.usage.include(usage)
    seed = utterance.synthesis.seed if usage.seed is None else usage.seed
    spoken = DesignedSpeech(bytes(pcm), speech.info.sample_rate, text=utterance.synthesis.text, seed=seed)
    if spoken.seconds < SHORTEST_S:
        return spoken, f"shorter than {SHORTEST_S:g} s"
    is_asked = usage.finish_reason is FinishReason.LENGTH and max_new_tokens is not None and max_new_tokens <= most
    return spoken, None if is_asked else _FAULTS.get(usage.finish_reason or FinishReason.STOP)


async def _rendered(spoken: DesignedSpeech, speech: SpeechRequest) -> bytes:
    rendering = speech.delivery.rendering(speech.info)
    return await rendering.feed(spoken.pcm) + await rendering.close()


_STRINGS = ("instructions", "text", "language", "response_format", "model")
_PROPERTIES = {**{name: {"type": "string"} for name in _STRINGS}, "seed": {"type": "integer", "minimum": 0}}
_SCHEMA = {"type": "object", "required": ["instructions"], "properties": _PROPERTIES}
_DOCS = {"requestBody": {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}}
DIALECT = Dialect(
    "Stored voices",
    routes=(Route("POST /v1/audio/voices/design", design_voice, "Design a voice: three candidates", docs=_DOCS),),
)
