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
    TTSAudioRawFrame,
    TTSStoppedFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.workers.runner import WorkerRunner


def service(order: Order) -> Any:
    """Nothing but the address and the voice is set."""
    url, sockets, voice = order.url, order.url.replace("http", "ws", 1), order.voice
    match order.service:
        case "openai":
            from pipecat.services.openai.tts import OpenAITTSService

            return OpenAITTSService(
                api_key="none", base_url=f"{url}/v1", settings=OpenAITTSService.Settings(voice="alloy")
            )
        case "deepgram":
            from pipecat.services.deepgram.tts import DeepgramTTSService

            return DeepgramTTSService(
                api_key="none", base_url=sockets, settings=DeepgramTTSService.Settings(voice=voice)
            )
        case "deepgram-flux":
            from pipecat.services.deepgram.flux.tts import DeepgramFluxTTSService

            settings = DeepgramFluxTTSService.Settings(voice=f"flux-{voice}-en")
            return DeepgramFluxTTSService(api_key="none", url=f"{sockets}/v2/speak", settings=settings)
        case "elevenlabs":
            from pipecat.services.elevenlabs.tts import ElevenLabsTTSService

            return ElevenLabsTTSService(
                api_key="none", url=sockets, settings=ElevenLabsTTSService.Settings(voice=voice)
            )
        case "cartesia":
            from pipecat.services.cartesia.tts import CartesiaTTSService

            settings = CartesiaTTSService.Settings(voice=voice)
            return CartesiaTTSService(api_key="none", url=f"{sockets}/tts/websocket", settings=settings)
    raise ValueError(order.service)


class Listener(FrameProcessor):  # type: ignore[misc]
    """The end of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame | TTSStoppedFrame | TTSTextFrame | ErrorFrame | InterruptionFrame):
            self.frames.put_nowait(frame)
        await self.push_frame(frame, direction)


async def main() -> None:
    order, listener, errors = Order(), Listener(), []
    worker = PipelineWorker(
        Pipeline([service(order), listener]),
        params=PipelineParams(audio_out_sample_rate=24000),
        cancel_on_idle_timeout=False,
        enable_rtvi=False,
    )
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
        is_whole = False
        try:
            await worker.queue_frame(LLMFullResponseStartFrame())
            for piece in pieces(text):
                await worker.queue_frame(LLMTextFrame(piece))
            await worker.queue_frame(LLMFullResponseEndFrame())
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
    await converse(order, report, speak, words=lambda: list(words))
    assert not errors, errors
    await worker.queue_frame(EndFrame())
    await running


asyncio.run(main())
