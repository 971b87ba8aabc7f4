"""A Pipecat voice agent that speaks with Talkray and can be interrupted. Clients connect over a WebSocket.

    pip install "pipecat-ai[openai,cartesia,websocket]"
    PORT=8765 python pipecat_agent.py       # then connect with Pipecat's client SDK, or with another transport below

OPENAI_URL can be any server with OpenAI's /chat/completions and /audio/transcriptions. Pipecat's services for OpenAI,
Deepgram, ElevenLabs and Cartesia work with Talkray unmodified. Cartesia's service receives word timestamps, so after
an interruption the conversation contains only the words that were heard.
"""

import asyncio
import os
import sys

try:
    from pipecat.audio.vad.silero import SileroVADAnalyzer
    from pipecat.pipeline.pipeline import Pipeline
    from pipecat.pipeline.worker import PipelineParams, PipelineWorker
    from pipecat.processors.aggregators.llm_context import LLMContext
    from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
    from pipecat.serializers.protobuf import ProtobufFrameSerializer
    from pipecat.services.cartesia.tts import CartesiaTTSService
    from pipecat.services.openai.llm import OpenAILLMService
    from pipecat.services.openai.stt import OpenAISTTService
    from pipecat.transports.websocket.server import (
        SingleClientWebsocketServerParams,
        SingleClientWebsocketServerTransport,
    )
    from pipecat.workers.runner import WorkerRunner
except ModuleNotFoundError as error:
    sys.exit(f'{error.name} is missing: pip install "pipecat-ai[openai,cartesia,websocket]"')

TALKRAY = os.environ.get("TALKRAY_URL", "http://127.0.0.1:8000").replace("http", "ws", 1)
VOICE = os.environ.get("VOICE", "nora")
OPENAI_URL = os.environ.get("OPENAI_URL", "https://api.openai.com/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")


async def main() -> None:
    transport = SingleClientWebsocketServerTransport(
        host="127.0.0.1",
        port=int(os.environ.get("PORT", "8765")),
        params=SingleClientWebsocketServerParams(
            audio_in_enabled=True, audio_out_enabled=True, serializer=ProtobufFrameSerializer()
        ),
    )
    stt_model = os.environ.get("STT_MODEL", "gpt-4o-mini-transcribe")
    llm = OpenAILLMService.Settings(
        model=os.environ.get("LLM_MODEL", "gpt-4.1-mini"),
        system_instruction="You are heard, not read: answer in short plain sentences.",
    )
    # When the caller speaks, a new turn starts, which interrupts the agent.
    turns = LLMContextAggregatorPair(
        LLMContext(), user_params=LLMUserAggregatorParams(vad_analyzer=SileroVADAnalyzer())
    )
    pipeline = Pipeline(
        [
            transport.input(),
            OpenAISTTService(base_url=OPENAI_URL, api_key=KEY, settings=OpenAISTTService.Settings(model=stt_model)),
            turns.user(),
            OpenAILLMService(base_url=OPENAI_URL, api_key=KEY, settings=llm),
            CartesiaTTSService(
                url=f"{TALKRAY}/tts/websocket",
                api_key=os.environ.get("TALKRAY_API_KEY", "none"),
                settings=CartesiaTTSService.Settings(voice=VOICE),
            ),
            transport.output(),
            turns.assistant(),
        ]
    )
    params = PipelineParams(audio_in_sample_rate=16000, audio_out_sample_rate=24000)
    runner = WorkerRunner()
    await runner.add_workers(PipelineWorker(pipeline, params=params))
    await runner.run()


if __name__ == "__main__":
    asyncio.run(main())
