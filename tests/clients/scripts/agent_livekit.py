"""A LiveKit agent speaks one reply of a language model: `python agent_livekit.py order.json`."""

import asyncio
from importlib.metadata import version

import aiohttp
from common import Order, Report
from livekit import rtc
from livekit.agents import Agent, AgentSession, tts
from livekit.agents.voice.io import AudioOutput, AudioOutputCapabilities
from livekit.plugins import openai
from livekit_tts import plugin


class Loudspeaker(AudioOutput):
    """Plays all audio at once."""

    def __init__(self) -> None:
        super().__init__(label="loudspeaker", capabilities=AudioOutputCapabilities(pause=False), sample_rate=24000)
        self.pcm = bytearray()

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if not self.pcm:
            self.on_playback_started(created_at=0.0)
        self.pcm += frame.data

    def flush(self) -> None:
        super().flush()
        self.on_playback_finished(playback_position=len(self.pcm) / 48000, interrupted=False)

    def clear_buffer(self) -> None:
        raise AssertionError("nothing interrupts the agent")


async def main() -> None:
    order, loudspeaker = Order(), Loudspeaker()
    order.service, _, mode = order.service.partition("-")
    async with aiohttp.ClientSession() as http:
        speaking = plugin(order, http)
        session = AgentSession(
            llm=openai.LLM(base_url=order.language_model, api_key="none"),
            # Only with this adapter LiveKit translates a model's tags into those of a plugin that streams.
            tts=tts.StreamAdapter(tts=speaking) if mode else speaking,
            expressive=bool(mode),
        )
        session.output.audio = loudspeaker
        await session.start(Agent(instructions="Speak."), record=False)
        await session.generate_reply(user_input="Go on.")
        await session.aclose()
    report = Report(order, {"livekit-agents": version("livekit-agents")})
    report.turn("", bytes(loudspeaker.pcm), 24000, first_audio_s=None)
    report.write()


asyncio.run(main())
