"""Checks the request for a job and plans its texts. A mistake in any text is an error: no job is made."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from deployments.errors import InvalidRequest, PayloadTooLarge
from serve_app.api.parsing.client_input import switch
from serve_app.api.parsing.speech_body import check_length
from serve_app.api.resolve.build_utterance import build_utterance
from serve_app.api.resolve.ignored_fields import Reasons, left_out
from serve_app.api.resolve.make_request import strict_request
from serve_app.api.resolve.resolver import Resolver
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.config import ApiSettings
from serve_app.extensions.jobs.job_store import JobStore
from serve_app.extensions.jobs.settings import JobSettings
from serve_app.extensions.jobs.stored_job import (
    MOST_PARTS,
    MOST_SEGMENTS,
    JobPlan,
    Manner,
    Part,
    Rules,
    Segment,
    StoredJob,
)
from serve_app.extensions.text.spoken_text import ReadText
from serve_app.extensions.voices.stored_voice import StoredVoice
from serve_app.speech.segments import Segments, Utterance
from serve_app.text.characters import is_speakable

T = TypeVar("T", Rules, Manner)
INPUTS, CUSTOM_ID, DETERMINISTIC = "inputs", "custom_id", "deterministic"
_LONGEST_ID = 200
# The client chooses these when it fetches the audio.
_AT_FETCH = ("response_format", "sample_rate", "stream", "stream_format", "word_timestamps")
_LONGEST_PLANNING_S = 60.0
_EARLY_S, _FAR_TOO_LONG = 2.0, 4  # after this time, refuse a job that would take so many times the limit
_PIECE_PARTS, _PIECE_CHARS = 256, 1 << 18  # a piece of the plan ends with the part that reaches either limit


class Planned:
    """A job during planning. Its texts are stored in pieces, so that only one is in memory."""

    def __init__(self, store: JobStore, job_id: str, check_room: Callable[[int], None]) -> None:
        """`check_room` is called with the bytes of the plan so far, and raises Conflict over the quota."""
        self._store, self._job_id, self._check_room = store, job_id, check_room
        self.deterministic = False
        self.models: dict[str, dict[str, object]] = {}  # as in StoredJob
        self.ignored: Reasons = {}
        self.left_out: Counter[str] = Counter()  # of all texts
        self.num_segments: list[int] = []  # of each part
        self.pieces: list[int] = []  # the first part of each
        self.num_bytes = 0  # of the pieces
        self._rules: list[Rules] = []
        self._manners: list[Manner] = []
        self._parts: list[Part] = []
        self._num_chars = 0

    def indices(self, rules: Rules, manner: Manner) -> dict[str, int]:
        """The fields of a part that refer to both. A piece needs its first rules; further ones make it end earlier."""
        num_rules = len(self._rules)
        indices = {"rules": _index_of(self._rules, rules), "manner": _index_of(self._manners, manner)}
        if 0 < num_rules < len(self._rules):
            self._num_chars += sum(len(word) + len(said) for word, said in rules.lexicon.items())
        return indices

    async def add(self, part: Part) -> None:
        """Raises as `keep_piece` does."""
        self._parts.append(part)
        self.num_segments.append(len(part.segments))
        self._num_chars += len(part.sent)
        if len(self._parts) >= _PIECE_PARTS or self._num_chars >= _PIECE_CHARS:
            await self.keep_piece()

    async def keep_piece(self) -> None:
        """Keep what was added since the last piece. Raises StoreFailed, and Conflict beyond the quota."""
        if self._parts:
            first = len(self.num_segments) - len(self._parts)
            rules, manners = tuple(self._rules), tuple(self._manners)
            plan = JobPlan(rules=rules, manners=manners, parts=tuple(self._parts), first=first)
            self.num_bytes += await asyncio.to_thread(self._store.keep_piece, self._job_id, len(self.pieces), plan)
            self.pieces.append(first)
            self._rules, self._manners, self._parts, self._num_chars = [], [], [], 0
            self._check_room(self.num_bytes)


async def plan_into(made: Planned, resolver: Resolver, fields: Mapping[str, object]) -> None:
    """Raises InvalidRequest with the entry and its field, PayloadTooLarge, ModelNotFound, NotReady, StoreFailed,
    Conflict. The caller then removes the pieces that are in the store.
    """
    settings = resolver.settings
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
        raise InvalidRequest(f'{misplaced} belongs in each entry of inputs: {{"input": "..."}}.', misplaced)
    made.deterministic = switch(defaults, DETERMINISTIC)
    defaults.pop(DETERMINISTIC, None)
    # A part may be longer than the text of a request.
    long = replace(
        resolver, settings=settings.model_copy(update={"max_input_chars": settings.of(JobSettings).max_input_chars})
    )
    began_s = time.monotonic()
    for number, entry in enumerate(inputs):
        _check_time(time.monotonic() - began_s, number, len(inputs))
        if not isinstance(entry, dict):
            raise InvalidRequest(f'inputs[{number}] must be an object, such as {{"input": "..."}}.', INPUTS)
        try:
            sent = {name: value for name, value in entry.items() if value is not None}
            part = await _planned_part(made, long, settings, {**defaults, **sent})
        except InvalidRequest as error:
            is_own = error.param == "input" or error.param in entry
            param = f"inputs[{number}].{error.param}" if is_own else error.param
            raise type(error)(f"inputs[{number}]: {error.message}", param, error.code) from None
        await made.add(part)
    await made.keep_piece()


def _check_time(spent_s: float, done: int, total: int) -> None:
    """Raises PayloadTooLarge if planning takes too long, or certainly will."""
    is_certain = spent_s > _EARLY_S and spent_s * total > _FAR_TOO_LONG * _LONGEST_PLANNING_S * max(1, done)
    if is_certain or spent_s > _LONGEST_PLANNING_S:
        most = max(1, int(done * _LONGEST_PLANNING_S / spent_s) // 2)
        advice = f"Send them as several jobs of at most {most} parts."
        raise PayloadTooLarge(f"{INPUTS}: {total} parts take too long to plan now. {advice}", INPUTS)


async def _planned_part(made: Planned, long: Resolver, settings: ApiSettings, fields: dict[str, object]) -> Part:
    """Adds its rules, manner and model to `made`. `settings`: limits of a request, for all fields but the text."""
    custom_id = fields.pop(CUSTOM_ID, None)
    if custom_id is not None and (not isinstance(custom_id, str) or len(custom_id) > _LONGEST_ID):
        raise InvalidRequest(f"{CUSTOM_ID} must be a string of at most {_LONGEST_ID} characters.", CUSTOM_ID)
    if DETERMINISTIC in fields:
        raise InvalidRequest(f"{DETERMINISTIC} is a field of the job: write it beside inputs.", DETERMINISTIC)
    for name in ("ref_audio", "reference_audio"):
        if name in fields:
            advice = "store the recording (POST /v1/audio/voices), and name it in voice"
            raise InvalidRequest(f"{name}: a job speaks with stored voices: {advice}.", name)
    at_fetch = [name for name in _AT_FETCH if fields.pop(name, None) is not None]
    speech = await strict_request(long, fields)
    check_length("instructions", speech.body.instructions or "", settings)
    if made.deterministic and not speech.info.deterministic:
        reason = f"the codes of {speech.info.name} depend on what else its talkers do: set talker.deterministic"
        raise InvalidRequest(f"{DETERMINISTIC}: {reason}, or leave the field out.", DETERMINISTIC)
    utterance = (await build_utterance(long, speech, request_id="", client="")).utterance
    request = utterance.synthesis
    assert isinstance(speech.spoken, ReadText)
    stored = {}
    if speech.stored is not None:
        assert request.reference is not None, "a stored voice speaks by its recording"
        assert isinstance(speech.stored, StoredVoice)
        take = speech.stored.take_for(speech.body.instructions)
        by_vector = request.reference.x_vector_only
        stored = {"stored_voice": speech.stored.id, "style": take.style, "x_vector_only": by_vector}
    indices = made.indices(Rules.of(speech.spoken.rules), Manner.of(request, **stored))
    if speech.info.route not in made.models:
        made.models[speech.info.route] = StoredJob.described(speech.info)
    made.left_out += speech.spoken.left_out
    unread = {
        name: left_out(made.left_out) for name in ("input", "text") if speech.spoken.left_out and name in speech.ignored
    }
    chosen = {} if speech.chosen_voice is None else {"voice": f"none was sent: {speech.chosen_voice} speaks"}
    made.ignored |= speech.ignored | unread | chosen | dict.fromkeys(at_fetch, "asked for when audio is fetched")
    return await asyncio.to_thread(_part, utterance, speech, custom_id=custom_id, **indices)


def _part(utterance: Utterance, speech: SpeechRequest, *, custom_id: str | None, rules: int, manner: int) -> Part:
    """Blocks. Raises InvalidRequest."""
    request = utterance.synthesis
    segments = Segments.of(utterance, speech.info.max_segment_chars)
    end = segments.plan()[-1]
    return Part(
        sent=speech.body.input,
        rules=rules,
        manner=manner,
        seed=request.seed,
        redraws=utterance.may_redraw,
        segments=_segments(segments, speech, request.language) if is_speakable(request.text) else (),
        end_pause_s=0.0 if end.text else end.pause_s,
        custom_id=custom_id,
    )


def _segments(segments: Segments, speech: SpeechRequest, language: str) -> tuple[Segment, ...]:
    planned_segments: list[Segment] = []
    while (request := segments.known_segment(number := len(planned_segments))) is not None:
        own = None if request.language == language else request.language
        speed = segments.speed(number) * speech.body.speed
        if number == MOST_SEGMENTS:
            raise InvalidRequest(f"input makes more than {MOST_SEGMENTS} segments. Send it in several parts.", "input")
        styled: dict[str, str | None] = {}
        if (style := segments.style(number)) and not speech.is_tagged:
            styled = {"instructions": request.instructions} if speech.stored is None else {"take": style}
        segment = Segment(text=request.text, pause_s=segments.pause_s(number), speed=speed, language=own, **styled)
        planned_segments.append(segment)
    return tuple(planned_segments)


def _index_of(known: list[T], wanted: T) -> int:
    """The index of `wanted` in the list, to which it is added if missing."""
    if wanted not in known:
        known.append(wanted)
    return known.index(wanted)
