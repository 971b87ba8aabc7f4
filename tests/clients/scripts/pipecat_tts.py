"""pipecat-ai with one of its speech services in a pipeline, spoken to as a language model does."""

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

from common import Order, Report, converse, pieces
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    OutputAudioRawFrame,
    StartFrame,
    TTSAudioRawFrame,
    TTSStartedFrame,
    TTSStoppedFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import TransportParams
from pipecat.workers.runner import WorkerRunner

TIMED = ("elevenlabs", "cartesia")  # with times of words
DEVICE_S = 0.04  # that the loudspeaker holds: without it each late turn of this process's loop is a stall
HEARD = (
    *(TTSStartedFrame, TTSAudioRawFrame, TTSTextFrame, TTSStoppedFrame),
    *(InterruptionFrame, LLMFullResponseEndFrame),
)


def service(order: Order) -> Any:
    url, sockets, voice = order.url, order.url.replace("http", "ws", 1), order.voice
    match order.service:
        case "openai":
            from pipecat.services.openai.tts import VALID_VOICES, OpenAITTSService

            settings = OpenAITTSService.Settings(voice=voice if voice in VALID_VOICES else "alloy")
            return OpenAITTSService(api_key="none", base_url=f"{url}/v1", settings=settings)
        case "deepgram":
            from pipecat.services.deepgram.tts import DeepgramTTSService

            return DeepgramTTSService(api_key="x", base_url=sockets, settings=DeepgramTTSService.Settings(voice=voice))
        case "deepgram-flux":
            from pipecat.services.deepgram.flux.tts import DeepgramFluxTTSService

            settings = DeepgramFluxTTSService.Settings(voice=f"flux-{voice}-en")
            return DeepgramFluxTTSService(api_key="none", url=f"{sockets}/v2/speak", settings=settings)
        case "elevenlabs":
            from pipecat.services.elevenlabs.tts import ElevenLabsTTSService

            return ElevenLabsTTSService(api_key="x", url=sockets, settings=ElevenLabsTTSService.Settings(voice=voice))
        case "cartesia":
            from pipecat.services.cartesia.tts import CartesiaTTSService

            settings = CartesiaTTSService.Settings(voice=voice)
            return CartesiaTTSService(api_key="none", url=f"{sockets}/tts/websocket", settings=settings)
    raise ValueError(order.service)


class Speaker(BaseOutputTransport):  # type: ignore[misc]
    """Takes audio as fast as it is played. Pipecat's transport lets each word pass when its time has come."""

    def __init__(self) -> None:
        super().__init__(TransportParams(audio_out_enabled=True, audio_out_end_silence_secs=0))
        self._played_s: float | None = None  # when all that was written has been played
        self.stalled_s = 0.0  # how long there was nothing to play

    def restart(self) -> None:
        self._played_s, self.stalled_s = None, 0.0

    async def start(self, frame: StartFrame) -> None:
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def write_audio_frame(self, frame: OutputAudioRawFrame) -> bool:
        now_s = asyncio.get_running_loop().time()
        self.stalled_s += max(0.0, now_s - (self._played_s or now_s))
        self._played_s = max(self._played_s or now_s, now_s) + len(frame.audio) / 2 / frame.sample_rate
        await asyncio.sleep(self._played_s - now_s - DEVICE_S)
        return True


class Listener(FrameProcessor):  # type: ignore[misc]
    """The end of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, HEARD):
            self.frames.put_nowait(frame)
        await self.push_frame(frame, direction)


async def main() -> None:
    order, listener, errors = Order(), Listener(), []
    speaker = Speaker() if order.service in TIMED else None
    worker = PipelineWorker(
        Pipeline([service(order), *([speaker] if speaker else []), listener]),
        params=PipelineParams(audio_out_sample_rate=24000), cancel_on_idle_timeout=False, enable_rtvi=False,
    )  # fmt: skip
    started = asyncio.Event()

    @worker.event_handler("on_pipeline_started")  # type: ignore[untyped-decorator]
    async def begin(*_: object) -> None:
        started.set()

    @worker.event_handler("on_pipeline_error")  # type: ignore[untyped-decorator]
    async def fail(_: object, frame: ErrorFrame) -> None:
        errors.append(frame.error)

    runner = WorkerRunner()
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    await started.wait()
    words: list[str] = []

    async def speak(text: str) -> AsyncIterator[tuple[bytes, int]]:
        words.clear()
        if speaker is not None:
            speaker.restart()
        is_whole = False
        try:
            await worker.queue_frame(LLMFullResponseStartFrame())
            for piece in pieces(text):
                await worker.queue_frame(LLMTextFrame(piece))
            await worker.queue_frame(LLMFullResponseEndFrame())
            while not isinstance(await listener.frames.get(), TTSStartedFrame):
                pass  # the end of the turn that was interrupted
            while not isinstance(frame := await listener.frames.get(), TTSStoppedFrame):
                if isinstance(frame, TTSAudioRawFrame):
                    yield frame.audio, frame.sample_rate
                elif isinstance(frame, TTSTextFrame):
                    words.extend(frame.text.split())
            is_whole = True
        finally:
            if not is_whole:
                await worker.queue_frame(InterruptionFrame())
                while not isinstance(await listener.frames.get(), InterruptionFrame):
                    pass

    report = Report(order, {"pipecat-ai": version("pipecat-ai")})
    await converse(
        order,
        report,
        speak,
        words=lambda: list(words),
        words_by=(lambda _: list(words)) if speaker is not None else None,
        stalled_s=lambda: 0.0 if speaker is None else speaker.stalled_s,
    )
    assert not errors, errors
    await worker.queue_frame(EndFrame())
    await running


if __name__ == "__main__":
    asyncio.run(main())
