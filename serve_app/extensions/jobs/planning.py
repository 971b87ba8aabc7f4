"""Check the request for a job and plan its texts. An error in any text causes the entire job to be rejected."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

from deployments.errors import InvalidRequest, PayloadTooLarge
from serve_app.api.parsing.client_input import switch
from serve_app.api.parsing.speech_body import check_length
from serve_app.api.resolve.ignored_fields import Reasons, left_out
from serve_app.api.resolve.make_utterance import build_utterance
from serve_app.api.resolve.resolver import Resolver
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.config import ApiSettings
from serve_app.extension import hooks_of, in_order
from serve_app.extensions import load_extensions
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
from serve_app.extensions.text.spoken_text import rules_of
from serve_app.extensions.voices.library import Voices
from serve_app.extensions.voices.stored_voice import StoredVoice
from serve_app.speech.segments import Segments, Utterance
from serve_app.speech.speech_models import SpeechModels
from serve_app.text.characters import is_speakable

T = TypeVar("T", Rules, Manner)
INPUTS, CUSTOM_ID, DETERMINISTIC = "inputs", "custom_id", "deterministic"
_LONGEST_ID = 200
# Fields that the client sets when it downloads the audio.
_AT_FETCH = ("response_format", "sample_rate", "stream", "stream_format", "word_timestamps")
_LONGEST_PLANNING_S = 60.0
_EARLY_S, _FAR_TOO_LONG = 2.0, 4  # after this many seconds, reject a job that would take four times the limit
_PIECE_PARTS, _PIECE_CHARS = 256, 1 << 18  # maximum size of each piece of the plan


def resolver_of_jobs(models: SpeechModels, settings: ApiSettings, voices: Voices) -> Resolver:
    """Return the resolver of the process that plans jobs. It has all hooks without state, and those of `voices`."""
    extensions = in_order(load_extensions(settings.extensions))
    return Resolver(models, settings, hooks_of(extensions, {"voices": voices}))


class Planned:
    """A job that is being planned. Its texts are stored in pieces, so that only one piece is in memory."""

    def __init__(self, store: JobStore, job_id: str, check_room: Callable[[int], None]) -> None:
        """`check_room` takes the current size of the plan in bytes, and raises Conflict if it exceeds the quota."""
        self._store, self._job_id, self._check_room = store, job_id, check_room
        self.deterministic = False
        self.models: dict[str, dict[str, object]] = {}  # as in StoredJob.models
        self.ignored: Reasons = {}
        self.left_out: Counter[str] = Counter()  # characters left out of all texts
        self.num_segments: list[int] = []  # of each part
        self.pieces: list[int] = []  # number of the first part in each piece
        self.num_bytes = 0  # total of the stored pieces
        self._rules: list[Rules] = []
        self._manners: list[Manner] = []
        self._parts: list[Part] = []
        self._num_chars = 0

    def indices(self, rules: Rules, manner: Manner) -> dict[str, int]:
        """Return the fields of a part that refer to its rules and its manner.

        Every piece needs one set of rules. Any further sets count toward the piece's maximum size.
        """
        num_rules = len(self._rules)
        indices = {"rules": _index_of(self._rules, rules), "manner": _index_of(self._manners, manner)}
        if 0 < num_rules < len(self._rules):
            self._num_chars += sum(len(word) + len(said) for word, said in rules.lexicon.items())
        return indices

    async def add(self, part: Part) -> None:
        """Add a part, and store the piece if it is full. Raises StoreFailed, Conflict."""
        self._parts.append(part)
        self.num_segments.append(len(part.segments))
        self._num_chars += len(part.sent)
        if len(self._parts) >= _PIECE_PARTS or self._num_chars >= _PIECE_CHARS:
            await self.keep_piece()

    async def keep_piece(self) -> None:
        """Store the parts added since the last piece. Raises StoreFailed, and Conflict if they exceed the quota."""
        if self._parts:
            first = len(self.num_segments) - len(self._parts)
            rules, manners = tuple(self._rules), tuple(self._manners)
            plan = JobPlan(rules=rules, manners=manners, parts=tuple(self._parts), first=first)
            self.num_bytes += await asyncio.to_thread(self._store.keep_piece, self._job_id, len(self.pieces), plan)
            self.pieces.append(first)
            self._rules, self._manners, self._parts, self._num_chars = [], [], [], 0
            self._check_room(self.num_bytes)


async def plan_into(made: Planned, resolver: Resolver, fields: Mapping[str, object]) -> None:
    """Plan all parts of a job. After an error, the caller removes the stored pieces.

    Raises InvalidRequest with the entry and its field, PayloadTooLarge, ModelNotFound, NotReady, StoreFailed, Conflict.
    """
    settings = resolver.settings
    inputs, defaults = fields.get(INPUTS), {name: value for name, value in fields.items() if name != INPUTS}
    if not isinstance(inputs, list) or not inputs:
        raise InvalidRequest(
            'inputs is required. Send a list of objects with "input", the text of a part.',
            INPUTS,
            "missing_required_parameter",
        )
    if len(inputs) > MOST_PARTS:
        raise InvalidRequest(f"inputs has {len(inputs)} entries. Send at most {MOST_PARTS}.", INPUTS)
    if misplaced := next((name for name in ("input", "text", CUSTOM_ID) if name in defaults), None):
        raise InvalidRequest(f'{misplaced} belongs in each entry of inputs: {{"input": "..."}}.', misplaced)
    made.deterministic = switch(defaults, DETERMINISTIC)
    defaults.pop(DETERMINISTIC, None)
    # A part can be longer than the text in a speech request.
    most = settings.of(JobSettings).max_input_chars
    long = resolver.with_settings(settings.model_copy(update={"max_input_chars": most}))
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
    """Raise PayloadTooLarge if planning takes too long, or is certain to take too long."""
    is_certain = spent_s > _EARLY_S and spent_s * total > _FAR_TOO_LONG * _LONGEST_PLANNING_S * max(1, done)
    if is_certain or spent_s > _LONGEST_PLANNING_S:
        most = max(1, int(done * _LONGEST_PLANNING_S / spent_s) // 2)
        advice = f"Split the parts into jobs of at most {most} parts."
        raise PayloadTooLarge(f"{INPUTS}: {total} parts take too long to plan now. {advice}", INPUTS)


async def _planned_part(made: Planned, long: Resolver, settings: ApiSettings, fields: dict[str, object]) -> Part:
    """Return the part that `fields` describe. Add its rules, manner and model to `made`.

    `settings` limits all fields except the text, which `long` limits. Raises InvalidRequest.
    """
    custom_id = fields.pop(CUSTOM_ID, None)
    if custom_id is not None and (not isinstance(custom_id, str) or len(custom_id) > _LONGEST_ID):
        raise InvalidRequest(f"{CUSTOM_ID} must be a string of at most {_LONGEST_ID} characters.", CUSTOM_ID)
    if DETERMINISTIC in fields:
        raise InvalidRequest(f"{DETERMINISTIC} is a field of the job. Move it next to inputs.", DETERMINISTIC)
    for name in ("ref_audio", "reference_audio"):
        if name in fields:
            advice = "Store the recording with POST /v1/audio/voices, and send the name of the voice in voice"
            raise InvalidRequest(f"{name}: jobs support only stored voices. {advice}.", name)
    at_fetch = [name for name in _AT_FETCH if fields.pop(name, None) is not None]
    speech = await long.strict_request(fields)
    check_length("instructions", speech.instructions or "", settings)
    if made.deterministic and not speech.info.deterministic:
        reason = f"the codes of {speech.info.name} depend on concurrent requests. Set talker.deterministic"
        raise InvalidRequest(f"{DETERMINISTIC}: {reason}, or remove the field.", DETERMINISTIC)
    utterance = await build_utterance(long, speech, request_id="", client="")
    request = utterance.synthesis
    stored = {}
    if speech.voice.stored is not None:
        assert request.reference is not None, "a stored voice has a reference recording"
        assert isinstance(speech.voice.stored, StoredVoice)
        take = speech.voice.stored.take_for(speech.instructions)
        by_vector = request.reference.x_vector_only
        stored = {"stored_voice": speech.voice.stored.id, "style": take.style, "x_vector_only": by_vector}
    indices = made.indices(Rules.of(rules_of(speech.spoken, speech.info)), Manner.of(request, **stored))
    if speech.info.route not in made.models:
        made.models[speech.info.route] = StoredJob.described(speech.info)
    made.left_out += speech.spoken.left_out
    unread = {
        name: left_out(made.left_out) for name in ("input", "text") if speech.spoken.left_out and name in speech.ignored
    }
    chosen = {} if speech.voice.default is None else {"voice": f"not set: {speech.voice.default} speaks"}
    made.ignored |= speech.ignored | unread | chosen | dict.fromkeys(at_fetch, "set it when you download the audio")
    return await asyncio.to_thread(_part, utterance, speech, custom_id=custom_id, **indices)


def _part(utterance: Utterance, speech: SpeechRequest, *, custom_id: str | None, rules: int, manner: int) -> Part:
    """Split the text of a part into segments. Blocks if the text is long. Raises InvalidRequest."""
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
            raise InvalidRequest(f"input has more than {MOST_SEGMENTS} segments. Split it into several parts.", "input")
        styled: dict[str, str | None] = {}
        if (style := segments.style(number)) and not speech.is_tagged:
            styled = {"instructions": request.instructions} if speech.voice.stored is None else {"take": style}
        segment = Segment(text=request.text, pause_s=segments.pause_s(number), speed=speed, language=own, **styled)
        planned_segments.append(segment)
    return tuple(planned_segments)


def _index_of(known: list[T], wanted: T) -> int:
    """Return the index of `wanted` in `known`. Append `wanted` if the list does not contain it."""
    if wanted not in known:
        known.append(wanted)
    return known.index(wanted)
