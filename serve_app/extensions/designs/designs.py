"""Design voices from descriptions. `POST /v1/audio/voices/design` creates three candidates from a description, and
`POST /v1/audio/voices` with `design` stores a candidate as a voice.

The store keeps candidates and their owners for an hour, so that any replica can turn one into a voice. An owner has
at most MOST_KEPT candidates; new ones replace the oldest.
"""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.errors import InvalidRequest, NotFound
from deployments.protocol import FinishReason, ModelKind, Sampling
from serve_app.api import catalogue
from serve_app.api.access.callers import VISITOR
from serve_app.api.context import state_of
from serve_app.api.parsing import field_names
from serve_app.api.request_record import Usage
from serve_app.api.resolve import ignored_fields
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest
from serve_app.api.responses.speech_response import while_connected
from serve_app.api.responses.whole_audio import ByteQuota
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.audio.recordings import MIN_SECONDS
from serve_app.extension import Dialect, Route
from serve_app.extensions.models.model_choice import not_deployed
from serve_app.extensions.voices.library import Voices, voices_of
from serve_app.extensions.voices.stored_voice import (
    MAX_DESCRIPTION,
    Details,
    SentRecording,
    StoredDesign,
    StoredVoice,
    Take,
    now,
)
from serve_app.text.languages import language_name

Json = dict[str, object]

NUM_CANDIDATES = 3
MOST_KEPT = 30  # maximum per owner, at most 45 MB in total
LONGEST_S, SHORTEST_S = 28.0, MIN_SECONDS  # duration of a candidate, which is later cloned like a recording
_MOST_CHARS = 500  # longer texts take more than LONGEST_S to speak
_BYTES_PER_S = 3 * 48_000 * 2  # per candidate, for its samples and the audio in the response
_NO_PERSON = "not required: designed from a description, without a recording of a person"
_NAMES: field_names.Names = {
    "instructions": "instructions",
    "description": "instructions",
    "text": "input",
    "input": "input",
    **{name: name for name in ("model", "language", "any_language", "seed", "response_format", "sample_rate")},
    "ignore_eos": "ignore_eos",
    **{option.name: option.name for option in fields(Sampling)},
}
_PROMPT_NAMES: field_names.Names = {"prompt": "instructions", "script_hint": "input", "language": "language"}
# Default texts: everyday sentences that last five to nine seconds each.
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
    FinishReason.EARLY: "the speech ended too early",
    **dict.fromkeys((FinishReason.SILENCE, FinishReason.LOOP, FinishReason.RUNAWAY), "the speech did not end"),
    FinishReason.LENGTH: f"longer than {LONGEST_S:g} s",
}


@dataclass(frozen=True, slots=True)
class DesignedSpeech:
    """Speech that a VoiceDesign model generated for one candidate."""

    pcm: bytes  # s16le, mono
    text: str
    seed: int
    fault: str | None  # why the speech is not usable


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates for one request, and why any are missing."""

    made: list[tuple[StoredDesign, bytes]]  # candidates and their audio in the requested format
    left_out: list[Json]  # seeds of unusable candidates, with reasons

    @property
    def text(self) -> str | None:
        """Text that all candidates speak."""
        return self.made[0][0].take.text


async def design_voice(service: SpeechService, request: Request) -> Response:
    """Speak a text in three candidate voices that match a description. Clients may store a candidate within an hour."""
    sent = await service.read_fields(request)
    overrides = {"any_language": sent.get("any_language", False)}
    delivery = Delivery(AudioFormat.MP3, whole=True)
    speech = await speech_request(service, sent, _NAMES, delivery=delivery, overrides=overrides)
    if isinstance(model := sent.get("model"), str):
        catalogue.check_model(model, speech.info, service.settings)
    delivery = replace(speech.delivery, audio_format=speech.body.response_format or AudioFormat.MP3)
    made = await candidates(service, request, replace(speech, delivery=delivery))
    media_type = delivery.content_type(delivery.rate(speech.info))
    entries = [
        {
            "id": design.id,
            "object": "audio.voice_design",
            "seed": design.seed,
            "seconds": design.take.seconds,
            "expires_at": design.expires_at,
            "media_type": media_type,
            "audio": base64.b64encode(audio).decode(),
        }
        for design, audio in made.made
    ]
    answer = {"object": "list", "model": speech.info.name, "description": speech.body.instructions, "text": made.text}
    body = {**answer, "candidates": entries, "left_out": made.left_out}
    return JSONResponse(body, headers=ignored_fields.as_header(speech.ignored))


async def speech_request(
    service: SpeechService,
    sent: Mapping[str, object],
    names: field_names.Names,
    *,
    delivery: Delivery,
    overrides: Mapping[str, object] | None = None,
) -> SpeechRequest:
    """Create the request for a VoiceDesign model, like `lenient_request`, with a default text.

    Raises InvalidRequest if the server does not run a VoiceDesign model.
    """
    models = await service.models.infos()
    if all(info.kind is not ModelKind.VOICE_DESIGN for info in models):
        raise not_deployed(ModelKind.VOICE_DESIGN, models, "Designing a voice")
    design_fields: Json = {**dict.fromkeys(service.resolver.further_fields, "VoiceDesign"), **sent}
    speech = await service.resolver.lenient_request(design_fields, names, delivery=delivery, overrides=overrides)
    if speech.info.kind is not ModelKind.VOICE_DESIGN:
        raise InvalidRequest(f"model: {speech.info.name} cannot design voices. Use a VoiceDesign model.", "model")
    body = speech.body
    if not any(name in sent for name, ours in names.items() if ours == "input"):
        text = _TEXTS.get(language_name(body.language), _TEXTS["english"])
        body = body.model_copy(update={"input": text})
    if len(body.input) > _MOST_CHARS:
        message = f"text has {len(body.input)} characters. Send at most {_MOST_CHARS}."
        raise InvalidRequest(message, "text", "string_above_max_length")
    spoken, _ = await service.resolver.read_text(body, speech.info, speech.voice.stored)
    return replace(speech, body=body, spoken=spoken)


async def candidates(service: SpeechService, request: Request, speech: SpeechRequest) -> Candidates:
    """Speak all candidates in parallel, and store them for an hour. Raises InvalidRequest if none is usable."""
    await voices_of(service).all_of(StoredDesign)  # raises early if the server does not have a store
    caller = state_of(request).caller
    for _ in range(NUM_CANDIDATES - 1):  # access control has already counted one
        caller.count_request()
    with ByteQuota(caller.name) as quota:
        quota.hold(int(NUM_CANDIDATES * LONGEST_S * _BYTES_PER_S))
        spoken = await while_connected(_speak_all(service, request, speech), request.receive)
        usable = [each for each in spoken if each.fault is None]
        if not usable:
            why = "; ".join(str(each.fault) for each in spoken)
            raise InvalidRequest(f"text: all candidates failed ({why}). Send another text.", "text", "design_failed")
        designs = await _kept(voices_of(service), usable, speech)
        audio = [await _rendered(each, speech) for each in usable]
    left_out: list[Json] = [{"seed": each.seed, "reason": each.fault} for each in spoken if each.fault is not None]
    return Candidates(list(zip(designs, audio, strict=True)), left_out)


async def _speak_all(service: SpeechService, request: Request, speech: SpeechRequest) -> list[DesignedSpeech]:
    speaking = [asyncio.create_task(_speak(service, request, speech, number)) for number in range(NUM_CANDIDATES)]
    try:
        return await asyncio.gather(*speaking)
    finally:
        for task in speaking:
            task.cancel()
        await asyncio.wait(speaking)


async def _speak(service: SpeechService, request: Request, speech: SpeechRequest, number: int) -> DesignedSpeech:
    most = int(LONGEST_S / speech.info.frame_s) + 1  # the last frame is the end of speech
    max_new_tokens = speech.body.sampling.max_new_tokens
    changes: Json = {"max_new_tokens": most if max_new_tokens is None else min(max_new_tokens, most)}
    if speech.body.seed is not None:
        changes["seed"] = (speech.body.seed + number) % 2**64
    own = replace(speech, body=speech.body.model_copy(update=changes))
    utterance = await service.prepare_utterance(request, own)
    utterance = utterance.changed(request_id=f"{utterance.synthesis.request_id}-{number + 1}")
    usage, pcm = Usage(), bytearray()
    async with aclosing(service.models.of(utterance).speak(utterance, speech.info)) as chunks:
        async for chunk in chunks:
            usage.add(chunk)
            pcm += chunk.pcm
    state_of(request).record.usage.include(usage)
    is_asked = usage.finish_reason is FinishReason.LENGTH and max_new_tokens is not None and max_new_tokens <= most
    fault = None if is_asked else _FAULTS.get(usage.finish_reason or FinishReason.STOP)
    if len(pcm) / 2 / speech.info.sample_rate < SHORTEST_S:
        fault = f"shorter than {SHORTEST_S:g} s"
    seed = utterance.synthesis.seed if usage.seed is None else usage.seed
    return DesignedSpeech(bytes(pcm), utterance.synthesis.text, seed, fault)


async def _kept(voices: Voices, spoken: Sequence[DesignedSpeech], speech: SpeechRequest) -> list[StoredDesign]:
    """Store the candidates, owned by VISITOR, and delete the oldest ones that exceed the limit. Raises StoreFailed."""
    owner, language = VISITOR.get().name or "", language_name(speech.body.language)
    own = [each for each in await voices.all_of(StoredDesign) if each.owner == owner]
    for each in own[: max(0, len(own) + len(spoken) - MOST_KEPT)]:
        await voices.remove(each)
    designs = []
    for said in spoken:
        samples, rate = np.frombuffer(said.pcm, "<i2"), speech.info.sample_rate
        take, flac = await asyncio.to_thread(Take.of_samples, samples, rate, "PCM_16", text=said.text)
        design = StoredDesign.new(
            description=(speech.body.instructions or "")[:MAX_DESCRIPTION],
            language=None if language == "auto" else language,
            model=speech.info.name,
            seed=said.seed,
            take=take,
        )
        designs.append(await voices.keep(design, {take.sha256: flac}))
    return designs


async def _rendered(spoken: DesignedSpeech, speech: SpeechRequest) -> bytes:
    rendering = speech.delivery.rendering(speech.info)
    return await rendering.feed(spoken.pcm) + await rendering.close()


async def find(voices: Voices, design_id: str, *, field: str = "design") -> StoredDesign:
    """Return the caller's candidate with this ID. `field` is the name of the ID in errors. Raises NotFound."""
    designs = await voices.all_of(StoredDesign)
    matches = [each for each in designs if each.id == design_id.lower() and each.expires_at > now()]
    if not matches:
        why = "The design has expired, was replaced by newer ones, or belongs to another key"
        raise NotFound(f"{field}: {design_id[:80]!r} is unknown. {why}.", field, "design_not_found")
    return matches[0]


async def lock(voices: Voices, design_id: str, details: Details, *, field: str = "design") -> StoredVoice:
    """Store the audio and text of a candidate as a voice. The candidate provides any values missing from `details`.

    As with any voice, the audio is authoritative. A Base model clones the voice from the audio, as in the official
    package. The store does not keep the original codes, because they have not been prepared like a recording.

    Raises NotFound, InvalidRequest, Conflict.
    """
    design = await find(voices, design_id, field=field)
    details = replace(
        details,
        language=details.language or design.language,
        description=details.description or design.description,
        consent=details.consent or _NO_PERSON,
        provenance=f"design: {design.model}, seed {design.seed}",
    )
    flac = await voices.recording(design, design.take)
    return await voices.add(details, [SentRecording(flac, design.take.text)], field=field)


class VoiceDesigns:
    """Designs for the route that stores voices."""

    def __init__(self, voices: Voices) -> None:
        self._voices = voices

    async def lock(self, design_id: str, details: Details) -> StoredVoice:
        return await lock(self._voices, design_id, details)

    async def create(
        self, service: SpeechService, request: Request, details: Details, *, prompt: str, script: str | None
    ) -> StoredVoice:
        """OpenAI's voice from a prompt: lock the first usable candidate. Raises InvalidRequest, Conflict."""
        sent = {"prompt": prompt, "script_hint": script, "language": details.language}
        sent = {name: value for name, value in sent.items() if value is not None}
        speech = await speech_request(service, sent, _PROMPT_NAMES, delivery=Delivery(AudioFormat.MP3, whole=True))
        made = await candidates(service, request, speech)
        return await self.lock(made.made[0][0].id, details)


_STRINGS = ("instructions", "text", "language", "response_format", "model")
_PROPERTIES = {**{name: {"type": "string"} for name in _STRINGS}, "seed": {"type": "integer", "minimum": 0}}
_SCHEMA = {"type": "object", "required": ["instructions"], "properties": _PROPERTIES}
_DOCS = {"requestBody": {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}}
DIALECT = Dialect(
    "Stored voices",
    routes=(Route("POST /v1/audio/voices/design", design_voice, "Design three candidates for a voice", docs=_DOCS),),
)
