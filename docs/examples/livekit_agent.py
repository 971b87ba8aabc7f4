"""A LiveKit voice agent that speaks with Talkray and can be interrupted.

    pip install livekit-agents livekit-plugins-openai livekit-plugins-cartesia
    python livekit_agent.py dev     # with LIVEKIT_URL, LIVEKIT_API_KEY and LIVEKIT_API_SECRET

OPENAI_URL can be any server with OpenAI's /chat/completions and /audio/transcriptions. The Cartesia plugin, one of five
that work with Talkray unmodified, streams text and receives word timestamps. After an interruption, the conversation
therefore contains only the words that the caller heard.
"""

import os
import sys

try:
    import aiohttp
    from livekit.agents import Agent, AgentServer, AgentSession, JobContext, cli, inference
    from livekit.plugins import cartesia, openai
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is missing: pip install livekit-agents livekit-plugins-openai livekit-plugins-cartesia")

TALKRAY = os.environ.get("TALKRAY_URL", "http://127.0.0.1:8000")
OPENAI_URL = os.environ.get("OPENAI_URL", "https://api.openai.com/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")

server = AgentServer()


def agent_session(http: aiohttp.ClientSession | None = None) -> AgentSession:
    """Outside a LiveKit job, pass `http`, because only jobs provide a session."""
    return AgentSession(
        vad=inference.VAD(),
        stt=openai.STT(base_url=OPENAI_URL, api_key=KEY, model=os.environ.get("STT_MODEL", "gpt-4o-mini-transcribe")),
        llm=openai.LLM(base_url=OPENAI_URL, api_key=KEY, model=os.environ.get("LLM_MODEL", "gpt-4.1-mini")),
        tts=cartesia.TTS(
            base_url=TALKRAY,
            api_key=os.environ.get("TALKRAY_API_KEY", "none"),
            voice=os.environ.get("VOICE", "nora"),
            http_session=http,
        ),
        use_tts_aligned_transcript=True,  # keeps the words that were heard, based on Talkray's word timestamps
        # Half a second of speech interrupts the agent; LiveKit's turn detection service is not used.
        turn_handling={"turn_detection": "vad", "interruption": {"mode": "vad", "min_duration": 0.5}},
    )


def agent() -> Agent:
    return Agent(instructions="You are heard, not read: answer in short plain sentences.")


@server.rtc_session()
async def entrypoint(ctx: JobContext) -> None:
    session = agent_session()
    await session.start(agent=agent(), room=ctx.room)
    await session.say("Hello, how can I help you?")


if __name__ == "__main__":
    cli.run_app(server)
