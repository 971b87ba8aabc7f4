"""Record streams: the ingress's synthesizer in an actor, which stores codes, samples and times."""

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments import listener
from deployments.config import TalkerConfig
from deployments.errors import NotReady, ReplicaLost
from deployments.protocol import Codes, FinishReason, ModelInfo, PcmChunk, Sampling, SynthesisRequest
from deployments.serving import failover, handles
from serve_app.cli.serve.local_server import APP_NAME
from serve_app.config import AdmissionSettings
from serve_app.extensions.live.live_text import LiveText, LiveTexts
from serve_app.speech import replica_synthesizer
from serve_app.speech.replica_synthesizer import Deployed, ReplicaSynthesizer
from serve_app.speech.segments import Utterance
from serve_app.speech.utterance_synthesizer import UtteranceSynthesizer
from tools.experiments.faults import polite

_START_S = 300.0  # limit for the start of replicas on a busy machine


def one_deployed(codec: Any, talker: Any = None) -> Any:
    """Return the handles of the only model. `talker` is set if its GPU decodes."""
    pools = ("Talker", "Codec")
    return Deployed("", "embedded", TalkerConfig(), False, AdmissionSettings(), pools, codec, talker)


@dataclass(frozen=True, slots=True)
class Heard:
    """One delivered stream."""

    request_id: str
    codes: Codes
    pcm: bytes
    arrivals_s: tuple[float, ...]  # of chunks with audio, by time.time()
    finish_reason: FinishReason | None
    error: str | None = None


@ray.remote(num_cpus=0, max_concurrency=1000)
class Listener:
    """Client that requests speech as an ingress replica does. With `inline`, the talker's GPU generates all audio."""

    def __init__(self, *, inline: bool) -> None:
        codec = serve.get_deployment_handle("Codec", APP_NAME)
        talker = serve.get_deployment_handle("Talker", APP_NAME) if inline else None
        self._synthesizer = ReplicaSynthesizer(one_deployed(codec, talker=talker))
        self._utterances, self._live_texts = UtteranceSynthesizer(self._synthesizer), LiveTexts()
        self._num_sounding = 0  # streams that have delivered audio
        self._more_sound = asyncio.Condition()
        self._recordings: list[str] = []
        self._read = handles.stream_from_replica
        replica_synthesizer.stream_from_replica = self._noting  # type: ignore[attr-defined]  # a name that it imports
        failover._GIVE_UP_S = _START_S  # if all replicas die, streams wait for new ones

    async def recordings(self) -> list[str]:
        """Return how replicas cloned, in order: "codec samples" or "talker prompt"."""
        return self._recordings

    def _noting(
        self, handle: DeploymentHandle, method: str, request: object, *, lost: type[ReplicaLost]
    ) -> AsyncGenerator[Any, None]:
        if isinstance(request, SynthesisRequest) and request.reference is not None:
            recording = "samples" if request.reference.prompt is None else "prompt"
            assert (request.reference.audio is None) == (recording == "prompt")
            self._recordings.append(f"{'talker' if method == 'generate' else 'codec'} {recording}")
        return self._read(handle, method, request, lost=lost)

    async def all_sound(self, count: int) -> None:
        """Return once `count` streams have delivered audio."""
        async with self._more_sound:
            await self._more_sound.wait_for(lambda: self._num_sounding >= count)

    async def listen(self, request: Utterance, word_s: float = 0.0) -> Heard:
        """Run a request. With `word_s`, its text is streamed at this many seconds per word."""
        codes, pcm, arrivals_s, reason = [np.zeros((0, 16), np.int16)], [], [], None
        error = None
        try:
            async with self._speech(request, word_s) as speech, aclosing(speech) as chunks:
                async for chunk in chunks:
                    codes.append(chunk.codes.reshape(-1, 16))
                    pcm.append(chunk.pcm)
                    if chunk.pcm:
                        arrivals_s.append(time.time())
                        if len(arrivals_s) == 1:
                            await self._count()
                    reason = chunk.finish_reason
        except Exception as problem:
            error = repr(problem)
        if not arrivals_s:
            await self._count()  # count the stream, because it will never deliver audio
        return Heard(
            request.synthesis.request_id, np.concatenate(codes), b"".join(pcm), tuple(arrivals_s), reason, error
        )

    @asynccontextmanager
    async def _speech(self, request: Utterance, word_s: float) -> AsyncIterator[AsyncGenerator[PcmChunk, None]]:
        info = await self._model()
        if not word_s:
            yield self._utterances.speak_utterance(request, info, listener.Listener())
            return
        with await self._live_texts.open(request, info, max_chars=len(request.synthesis.text)) as live:
            writing = asyncio.create_task(_write(live, request.synthesis.text, word_s))
            await live.wait_for_words()
            yield self._utterances.speak_segments(
                live.utterance.synthesis, live, info, listener.Listener(), may_redraw=False
            )
            await writing

    async def _model(self) -> ModelInfo:
        """Return the model's info, which an ingress needs to recover streams. Retries on a busy machine."""
        async with asyncio.timeout(_START_S):
            while True:
                with suppress(NotReady):
                    return await self._synthesizer.describe()

    async def _count(self) -> None:
        async with self._more_sound:
            self._num_sounding += 1
            self._more_sound.notify_all()


async def _write(live: LiveText, text: str, word_s: float) -> None:
    for word in re.findall(r"\S+\s*", text):
        live.append(word)
        await asyncio.sleep(word_s)
    live.finish()


def difference(heard: Heard, other: Heard) -> str | None:
    """Describe the difference between two deliveries of an utterance. PCM may differ by 1 LSB."""
    if heard.error or other.error:
        return heard.error or other.error
    if heard.finish_reason is not other.finish_reason:
        return f"ended with {heard.finish_reason}, not {other.finish_reason}"
    if not np.array_equal(heard.codes, other.codes):
        return f"codes differ: {heard.codes.shape}, {other.codes.shape}"
    return polite.difference(heard.pcm, other.pcm)


def gaps_after(moment_s: float, streams: Sequence[Heard]) -> list[float]:
    """Return the seconds from `moment_s` to the next audio of each stream that was active then."""
    return [
        min(at_s for at_s in heard.arrivals_s if at_s > moment_s) - moment_s
        for heard in streams
        if heard.arrivals_s and heard.arrivals_s[0] <= moment_s < heard.arrivals_s[-1]
    ]


TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind."


def requests(count: int, *, frames: int) -> list[Utterance]:
    """Return different utterances of similar length."""
    options = Sampling(max_new_tokens=frames + 1)
    return [
        Utterance(SynthesisRequest(f"r{seed}", TEXT, voice="ryan", sampling=options, seed=seed, ignore_eos=True))
        for seed in range(count)
    ]


def long_requests(count: int, *, frames: int) -> list[Utterance]:
    """Return texts that are spoken in several segments of `frames` frames each."""
    return [
        request.changed(request_id=f"long{request.synthesis.seed}", text=" ".join([TEXT] * 30))
        for request in requests(count, frames=frames)
    ]


class Speaking:
    """Runs streams with a fixed concurrency."""

    def __init__(self, streams: list[Utterance], *, at_once: int, word_s: float = 0.0, inline: bool = False) -> None:
        """With `word_s`, texts are streamed at this many seconds per word. `inline` as in Listener."""
        self._word_s = word_s
        self._listener = Listener.options(scheduling_strategy=_here()).remote(inline=inline)  # type: ignore[attr-defined]
        self._at_once = at_once
        self._left = deque(streams)
        self._going: list[Any] = []
        self.heard: list[Heard] = []

    @property
    def done(self) -> bool:
        return not self._left and not self._going

    def go_on(self, *, may_begin: bool) -> None:
        """Start as many streams as permitted, and wait briefly for streams to end."""
        while may_begin and self._left and len(self._going) < self._at_once:
            self._going.append(self._listener.listen.remote(self._left.popleft(), self._word_s))
        ended, self._going = ray.wait(self._going, timeout=0.05) if self._going else ([], [])
        self.heard += ray.get(ended)

    def add(self, streams: list[Utterance]) -> None:
        """Append streams to the queue."""
        self._left.extend(streams)

    def recordings(self) -> list[str]:
        noted: list[str] = ray.get(self._listener.recordings.remote())
        return noted

    def drop_rest(self) -> None:
        """Drop the streams that have not started."""
        self._left.clear()

    def begun(self) -> None:
        """Wait until every active stream has delivered audio."""
        ray.get(self._listener.all_sound.remote(len(self._going)))

    def finish(self) -> list[Heard]:
        while not self.done:
            self.go_on(may_begin=True)
        return self.heard


def _here() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def wrong(heard: list[Heard], expected: list[Heard]) -> list[str]:
    """Describe the differences from streams of the same requests."""
    by_id = {each.request_id: each for each in expected}
    return [f"{each.request_id}: {problem}" for each in heard if (problem := difference(by_id[each.request_id], each))]
