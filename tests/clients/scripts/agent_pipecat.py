"""A Pipecat agent speaks one reply of a language model: `python agent_pipecat.py order.json`."""

import asyncio
from importlib.metadata import version

from common import Order, Report
from pipecat.frames.frames import EndFrame, ErrorFrame, LLMFullResponseEndFrame, LLMRunFrame, TTSAudioRawFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.workers.runner import WorkerRunner
from pipecat_tts import Listener, service


async def main() -> None:
    order, listener, errors = Order(), Listener(), []
    turns = LLMContextAggregatorPair(LLMContext([{"role": "user", "content": "Go on."}]))
    llm = OpenAILLMService(base_url=order.language_model, api_key="none")
    worker = PipelineWorker(
        Pipeline([turns.user(), llm, service(order), listener, turns.assistant()]),
        params=PipelineParams(audio_out_sample_rate=24000), cancel_on_idle_timeout=False, enable_rtvi=False,
    )  # fmt: skip

    @worker.event_handler("on_pipeline_error")  # type: ignore[untyped-decorator]
    async def fail(_: object, frame: ErrorFrame) -> None:
        errors.append(frame.error)

    runner = WorkerRunner()
    await runner.add_workers(worker)
    await worker.queue_frame(LLMRunFrame())
    running, pcm = asyncio.create_task(runner.run()), bytearray()
    async with asyncio.timeout(120):
        while not isinstance(frame := await listener.frames.get(), LLMFullResponseEndFrame):
            pcm += frame.audio if isinstance(frame, TTSAudioRawFrame) else b""
    assert not errors, errors
    await worker.queue_frame(EndFrame())
    await running
    report = Report(order, {"pipecat-ai": version("pipecat-ai")})
    report.turn("", bytes(pcm), 24000, first_audio_s=None)
    report.write()


asyncio.run(main())
