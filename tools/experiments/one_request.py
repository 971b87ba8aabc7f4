"""Trace one request on this CPU: `python -m tools.experiments.one_request "Hello there."`.

Prints the time at which the request first reaches each function of the table "One request" in docs/architecture.md,
then the codes of each frame and the level of each 10 ms of its samples. Ingress and engine are those of a server, but
run in one process. Stops 5 to 7, which connect processes, are therefore missing, and a CPU uses different classes at
stops 11 and 13. Tracing slows down the request until its first frame.
"""

import asyncio
import inspect
import sys
import time
from collections.abc import AsyncGenerator, Callable
from types import FrameType

import numpy as np
from httpx2 import ASGITransport, AsyncClient

from deployments.codec.plain_slots import PlainSlots
from deployments.config import TalkerConfig
from deployments.embedded_voice.cpu_networks import CpuNetworks
from deployments.protocol import FrameChunk, ModelInfo, PcmChunk, SynthesisRequest
from deployments.serving.failover import with_failover
from deployments.serving.replica_streams import TalkerAudio
from deployments.talker.audio.audio_streams import AudioStreams
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import StartClock, load_engine
from deployments.talker.runner.model_runner import ModelRunner
from deployments.weights.store import locate
from serve_app.api.application import create_api
from serve_app.api.resolve.resolver import Resolver
from serve_app.api.responses.respond import respond
from serve_app.config import AdmissionSettings, ApiSettings
from serve_app.speech.speech_models import SpeechModel
from serve_app.speech.utterance_synthesizer import UtteranceSynthesizer

STOPS: dict[Callable[..., object], int] = {
    Resolver.strict_request: 1,
    respond: 2,
    SpeechModel.speak: 3,
    UtteranceSynthesizer.speak_utterance: 4,
    Engine.add: 8,
    Engine.step: 9,
    ModelRunner.queue_step: 10,
    CpuNetworks.predict: 11,
    CpuNetworks.advance: 11,
    AudioStreams.add_frames: 12,
    PlainSlots.decode: 13,
}
BARS = " ▁▂▃▄▅▆▇█"
WINDOWS = 8  # per frame


class OneProcess:
    """`Synthesizer` that runs the engine in this process, and prints the steps of the request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.since_s = time.perf_counter()
        self._num_frames = 0
        self.ahead = {inspect.unwrap(stop).__code__: f"{at:2}  {stop.__qualname__}" for stop, at in STOPS.items()}

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Profile function for `sys.setprofile`."""
        if event == "call" and (stop := self.ahead.pop(frame.f_code, None)):
            self._say(f"stop {stop}")
            if not self.ahead:
                sys.setprofile(None)  # profiling slows down every call

    async def describe(self) -> ModelInfo:
        return self._engine.info

    def synthesize(self, request: SynthesisRequest, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        return with_failover(TalkerAudio(request, self._generate, info))

    async def _generate(self, request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        self._engine.add(0, request)
        while not self._engine.is_idle:
            for _, chunk in self._engine.step().chunks:
                self._show(chunk)
                yield chunk

    def _show(self, chunk: FrameChunk) -> None:
        for codes in chunk.codes:
            self._say(f"frame {self._num_frames:3}  codes " + " ".join(f"{code:4}" for code in codes))
            self._num_frames += 1
        samples = np.frombuffer(chunk.pcm, np.int16).astype(float)
        for windows in samples.reshape(-1, WINDOWS, self._engine.info.frame_samples // WINDOWS):
            loud = np.clip(np.log2(1 + np.sqrt(np.mean(windows**2, axis=-1))) - 5, 0, len(BARS) - 1)
            self._say("           sound |" + "".join(BARS[int(each)] for each in loud) + "|")
        if chunk.finish_reason is not None:
            self._say(f"the talker ends: {chunk.finish_reason}")

    def _say(self, what: str) -> None:
        print(f"{(time.perf_counter() - self.since_s) * 1e3:7.1f} ms  {what}", flush=True)


async def main(text: str) -> None:
    one = OneProcess(load_engine(locate("embedded"), TalkerConfig(device="cpu"), StartClock()))
    api = create_api({"": (one, AdmissionSettings())}, ApiSettings(), opened={})
    async with AsyncClient(transport=ASGITransport(api), base_url="http://127.0.0.1") as client:
        one.since_s = time.perf_counter()
        sys.setprofile(one.note)
        answer = await client.post("/v1/audio/speech", json={"input": text, "voice": "alloy", "seed": 7})
        sys.setprofile(None)
    print(f"the client: status {answer.status_code}, {len(answer.content)} bytes of {answer.headers['content-type']}")
    if one.ahead or answer.status_code != 200:
        sys.exit(f"the request did not pass {[*one.ahead.values()]}: bring STOPS up to date. {answer.text[:200]}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["Hello there."]))
