"""From what a client sent to the texts of a job, all checked: a mistake in any of them is an answer, never a job."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deployments.errors import InvalidRequest
from deployments.protocol import ModelInfo
from serve_app.api.requests.build_utterance import build_utterance
from serve_app.api.requests.ignored_fields import Reasons
from serve_app.api.requests.make_request import strict_request
from serve_app.api.requests.speech_body import check_length
from serve_app.api.requests.speech_request import Offer, SpeechRequest
from serve_app.config import ApiSettings
from serve_app.jobs.stored_job import (
    MOST_PARTS,
    MOST_SEGMENTS,
    JobPlan,
    Manner,
    Part,
    Rules,
    Segment,
    StoredJob,
)
from serve_app.speech.segments import Segments
from serve_app.text.characters import is_speakable

INPUTS, CUSTOM_ID, DETERMINISTIC = "inputs", "custom_id", "deterministic"
_LONGEST_ID = 200
_COMPARED = 16
# The client chooses these when it fetches the audio.
_AT_FETCH = ("response_format", "sample_rate", "stream", "stream_format", "word_timestamps")


@dataclass(slots=True)
class Planned:
    """A plan as it grows, with what is known of its models and of fields without effect."""

    rules: list[Rules] = field(default_factory=list)
    manners: list[Manner] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    infos: dict[str, ModelInfo] = field(default_factory=dict)
    deterministic: bool = False
    ignored: Reasons = field(default_factory=dict)

    def plan(self) -> JobPlan:
        return JobPlan(rules=tuple(self.rules), manners=tuple(self.manners), parts=tuple(self.parts))

    @property
    def models(self) -> dict[str, dict[str, object]]:
        return {name: StoredJob.described(info) for name, info in self.infos.items()}


async def planned(offer: Offer, fields: Mapping[str, object]) -> Planned:
    """The plan of a job. Raises InvalidRequest that names the entry and its field, ModelNotFound, NotReady."""
    settings = offer.settings
    inputs, defaults = fields.get(INPUTS), {name: value for name, value in fields.items() if name != INPUTS}
    if not isinstance(inputs, list) or not inputs:
        raise InvalidRequest(
            'inputs is required: a list of objects with "input", the text of each part.',
            INPUTS,
            "missing_required_parameter",
        )
    if len(inputs) > MOST_PARTS:
        raise InvalidRequest(f"inputs has {len(inputs)} entries, at most {MOST_PARTS} are allowed.", INPUTS)
    if misplaced := next((name for name in ("input", "text", CUSTOM_ID) if name in defaults), None):
        raise InvalidRequest(f'{misplaced} belongs into each entry of inputs: {{"input": "..."}}.', misplaced)
    made = Planned(deterministic=_is_deterministic(defaults.pop(DETERMINISTIC, None)))
    # A part may be longer than the text of a request.
    long = replace(offer, settings=settings.model_copy(update={"max_input_chars": settings.jobs.max_input_chars}))
    for number, entry in enumerate(inputs):
        if not isinstance(entry, dict):
            raise InvalidRequest(f'inputs[{number}] must be an object, such as {{"input": "..."}}.', INPUTS)
        try:
            sent = {name: value for name, value in entry.items() if value is not None}
            await _add(made, long, settings, {**defaults, **sent})
        except InvalidRequest as error:
            is_own = error.param == "input" or error.param in entry
            param = f"inputs[{number}].{error.param}" if is_own else error.param
            raise type(error)(f"inputs[{number}]: {error.message}", param, error.code) from None
        await asyncio.sleep(0)  # a book has thousands, and segments of other jobs are read meanwhile
    return made


async def _add(made: Planned, long: Offer, settings: ApiSettings, fields: dict[str, object]) -> None:
    """Plan one part. `settings`: of a request, which bound what is no text of the part."""
    custom_id = fields.pop(CUSTOM_ID, None)
    if custom_id is not None and (not isinstance(custom_id, str) or len(custom_id) > _LONGEST_ID):
        raise InvalidRequest(f"{CUSTOM_ID} must be a string of at most {_LONGEST_ID} characters.", CUSTOM_ID)
    if DETERMINISTIC in fields:
        raise InvalidRequest(f"{DETERMINISTIC} is a field of the job: write it beside inputs.", DETERMINISTIC)
    for name in ("ref_audio", "reference_audio"):
        if name in fields:
            reason = (
                "a job speaks with stored voices: store the recording (POST /v1/audio/voices), and name it in voice"
            )
            raise InvalidRequest(f"{name}: {reason}.", name)
    at_fetch = [name for name in _AT_FETCH if fields.pop(name, None) is not None]
    speech = await strict_request(long, fields)
    check_length("instructions", speech.body.instructions or "", settings)
    if made.deterministic and not speech.info.deterministic:
        reason = f"the codes of {speech.info.name} depend on what else its talkers do: set talker.deterministic"
        raise InvalidRequest(f"{DETERMINISTIC}: {reason}, or leave the field out.", DETERMINISTIC)
    utterance = await build_utterance(long, speech, request_id="", client="")
    request = utterance.synthesis
    stored = {}
    if speech.stored is not None:
        assert request.reference is not None, "a stored voice speaks by its recording"
        take = speech.stored.take_for(speech.body.instructions)
        by_vector = request.reference.x_vector_only
        stored = {"stored_voice": speech.stored.id, "style": take.style, "x_vector_only": by_vector}
    segments = Segments.of(utterance, speech.info.max_segment_chars)
    part = Part(
        sent=speech.body.input,
        rules=_index_of(made.rules, Rules.of(speech.spoken.rules)),
        manner=_index_of(made.manners, Manner.of(request, **stored)),
        seed=request.seed,
        redraws=utterance.may_redraw,
        segments=_segments(segments, speech, request.language) if is_speakable(request.text) else (),
        end_pause_s=_end_pause_s(segments),
        custom_id=custom_id,
    )
    if len(part.segments) > MOST_SEGMENTS:
        raise InvalidRequest(f"input makes {len(part.segments)} segments: send it in parts.", "input")
    made.parts.append(part)
    made.infos.setdefault(speech.info.route, speech.info)
    made.ignored |= speech.ignored | dict.fromkeys(at_fetch, "asked for when audio is fetched")


def _is_deterministic(sent: object) -> bool:
    if not isinstance(sent, bool | None):
        raise InvalidRequest(f"{DETERMINISTIC} must be true or false.", DETERMINISTIC)
    return bool(sent)


def _segments(segments: Segments, speech: SpeechRequest, language: str) -> tuple[Segment, ...]:
    planned_segments: list[Segment] = []
    while (request := segments.known_segment(number := len(planned_segments))) is not None:
        own = None if request.language == language else request.language
        speed = segments.speed(number) * speech.body.speed
        planned_segments.append(Segment(text=request.text, pause_s=segments.pause_s(number), speed=speed, language=own))
    return tuple(planned_segments)


def _end_pause_s(segments: Segments) -> float:
    last = segments.plan()[-1]
    return 0.0 if last.text else last.pause_s


def _index_of(known: list[Rules] | list[Manner], wanted: Rules | Manner) -> int:
    """Its index in the list; it is added unless it is one of the latest, as parts mostly share theirs."""
    latest = range(len(known) - 1, max(-1, len(known) - 1 - _COMPARED), -1)
    index = next((index for index in latest if known[index] == wanted), None)
    if index is None:
        index = len(known)
        known.append(wanted)  # type: ignore[arg-type]
    return index
