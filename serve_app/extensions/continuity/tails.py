"""Keep the end of earlier speech, so that later speech can continue in the same voice, pace and mood.

A *tail* consists of a few words and their codes. Given a tail, a talker generates the codes that follow it.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, replace

from pydantic import BaseModel

from deployments.config import Strict
from deployments.listener import Listener
from deployments.protocol import ModelInfo, PcmChunk, SynthesisRequest, Tail
from serve_app.api.resolve.resolver import Resolver
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.extension import ExtensionState
from serve_app.speech.observers import Observer
from serve_app.speech.segments import StreamTail, Utterance

PREVIOUS = "previous_request_id"
NO_TAIL = "no recent finished request with this voice has this ID"

_LEAD_S = 1.0  # how much audio is left to play when the next utterance begins
_KEPT_S = 600.0
_MOST_BYTES = 8 << 20  # for all tails together, enough for about 4,000 requests
_ENTRY_BYTES = 500  # in addition to text, codes and names


@dataclass(frozen=True, slots=True)
class _KeptTail:
    tail: Tail
    voice: tuple[object, ...]
    until_s: float
    num_bytes: int


class ContinuitySettings(Strict):
    """Settings of continuity between segments (docs/joints.md)."""

    joints: bool = False  # continue the voice and pace of the previous segment in a long text


class ContinuityFields(BaseModel):
    """Body field of this extension."""

    previous_request_id: str | None = None  # continue from where this request ended


class TailStore(ExtensionState):
    """Keeps the tails of finished requests for up to ten minutes. Drops the oldest tail to stay below a size limit."""

    body_fields = ContinuityFields

    def __init__(self, *, joins: bool) -> None:
        """If `joins` is set, each segment and each utterance in a conversation continues the previous one."""
        self.joins = joins
        self._kept: OrderedDict[tuple[str, str], _KeptTail] = OrderedDict()
        self._num_bytes = 0

    async def resolve(self, resolver: Resolver, speech: SpeechRequest, utterance: Utterance) -> Utterance:
        """Continue the speech of the request in `previous_request_id`. If its tail is not stored, report the field as
        ignored.
        """
        utterance = replace(utterance, joins=self.joins)
        if (previous_id := speech.body.of(ContinuityFields).previous_request_id) is None:
            return utterance
        if (tail := self.find(utterance.synthesis, previous_id)) is None:
            return replace(utterance, ignored={speech.fields.get(PREVIOUS, PREVIOUS): NO_TAIL})
        return utterance.changed(tail=tail)

    def observe(self, utterance: Utterance, info: ModelInfo) -> Observer:
        return _KeepTail(self, utterance)

    def discard(self, utterance: Utterance) -> None:
        self._remove((utterance.synthesis.client, utterance.synthesis.request_id))

    def save(self, request: SynthesisRequest, tail: Tail | None) -> None:
        """Store the tail of `request` for later requests of the same client. None deletes the stored tail."""
        key = request.client, request.request_id
        self._remove(key)
        if tail is None:
            return
        num_bytes = _ENTRY_BYTES + 4 * sum(map(len, (tail.text, *key))) + tail.codes.nbytes
        self._kept[key] = _KeptTail(tail, _voice(request), until_s=time.monotonic() + _KEPT_S, num_bytes=num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > _MOST_BYTES:
            self._remove(next(iter(self._kept)))

    def find(self, request: SynthesisRequest, previous_id: str) -> Tail | None:
        """Return the tail of the client's request `previous_id` if its voice is that of `request`, or None."""
        kept = self._kept.get((request.client, previous_id))
        is_fit = kept is not None and kept.until_s > time.monotonic() and kept.voice == _voice(request)
        return kept.tail if kept is not None and is_fit else None

    def _remove(self, key: tuple[str, str]) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self._num_bytes -= kept.num_bytes


class _KeepTail:
    """Observer that stores the tail of an utterance after its last chunk."""

    def __init__(self, tails: TailStore, utterance: Utterance) -> None:
        self._tails, self._utterance, self._end = tails, utterance, StreamTail()

    def feed(self, chunk: PcmChunk) -> None:
        self._end.add(chunk)

    def end(self) -> None:
        request, live = self._utterance.synthesis, self._utterance.live_text
        self._tails.save(request, self._end.tail(request.text if live is None else live.spoken))


class Continuation:
    """State of a conversation in which each utterance continues from the end of the previous one."""

    def __init__(self, tails: TailStore) -> None:
        self._tails = tails
        self._listener = Listener()
        self.previous_id: str | None = None  # request that the next utterance continues

    def tail(self, request: SynthesisRequest) -> Tail | None:
        """Return the tail that `request` continues, or None if this is the first utterance or the voice is new."""
        return None if self.previous_id is None else self._tails.find(request, self.previous_id)

    @property
    def patience_s(self) -> float:
        """How many seconds the next utterance can wait for more text, because earlier audio is still playing."""
        now_s = time.monotonic()
        return max(0.0, self._listener.lead_s(now_s) - _LEAD_S)

    def deliver(self, audio_s: float) -> None:
        """Record that the server has sent `audio_s` seconds of audio."""
        self._listener.deliver(audio_s, now_s=time.monotonic())

    def count(self, request: SynthesisRequest) -> None:
        """Record the end of an utterance, which the next utterance continues."""
        self.previous_id = request.request_id if self._tails.joins else None

    def break_off(self) -> None:
        """Reset after an interruption, because the listener may not have heard all of the earlier speech."""
        self.previous_id = None
        self._listener = Listener()


def _voice(request: SynthesisRequest) -> tuple[object, ...]:
    """Return a key that is the same for all requests with the same voice."""
    reference = request.reference
    described = request.instructions if request.voice is None and reference is None else None
    return request.model, request.voice, described, reference and (reference.key, reference.x_vector_only)
