"""Streams that are listened to at the same time."""

from collections import deque
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.protocol import Sampling, SynthesisRequest
from tests.faults.listener import Heard, Listener, difference

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind."


def requests(count: int, *, frames: int) -> list[SynthesisRequest]:
    """Different utterances of about the same length."""
    options = Sampling(max_new_tokens=frames + 1)
    return [
        SynthesisRequest(f"r{seed}", TEXT, voice="ryan", sampling=options, seed=seed, ignore_eos=True)
        for seed in range(count)
    ]


def long_requests(count: int, *, frames: int) -> list[SynthesisRequest]:
    """Texts that are spoken in several segments of so many frames each."""
    return [
        replace(request, request_id=f"long{request.seed}", text=" ".join([TEXT] * 30))
        for request in requests(count, frames=frames)
    ]


class Speaking:
    """Streams, a fixed number at once."""

    def __init__(
        self, streams: list[SynthesisRequest], *, at_once: int, word_s: float = 0.0, inline: bool = False
    ) -> None:
        """Where a word takes time, texts are written while they are spoken. `inline` as in Listener."""
        self._word_s = word_s
        self._listener = Listener.options(scheduling_strategy=_here()).remote(inline=inline)
        self._at_once = at_once
        self._left = deque(streams)
        self._going: list[Any] = []
        self.heard: list[Heard] = []

    @property
    def done(self) -> bool:
        return not self._left and not self._going

    def go_on(self, *, may_begin: bool) -> None:
        """Begin what may begin, and wait a moment for streams that end."""
        while may_begin and self._left and len(self._going) < self._at_once:
            self._going.append(self._listener.listen.remote(self._left.popleft(), self._word_s))
        ended, self._going = ray.wait(self._going, timeout=0.05) if self._going else ([], [])
        self.heard += ray.get(ended)

    def add(self, streams: list[SynthesisRequest]) -> None:
        """More of them, behind the others."""
        self._left.extend(streams)

    def recordings(self) -> list[str]:
        noted: list[str] = ray.get(self._listener.recordings.remote())
        return noted

    def drop_rest(self) -> None:
        """Begin none of those that have not begun."""
        self._left.clear()

    def begun(self) -> None:
        """Wait until every stream under way has brought audio."""
        ray.get(self._listener.all_sound.remote(len(self._going)))

    def finish(self) -> list[Heard]:
        while not self.done:
            self.go_on(may_begin=True)
        return self.heard


def _here() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def wrong(heard: list[Heard], expected: list[Heard]) -> list[str]:
    """What is different about streams from those of the same request."""
    by_id = {each.request_id: each for each in expected}
    return [f"{each.request_id}: {problem}" for each in heard if (problem := difference(by_id[each.request_id], each))]
