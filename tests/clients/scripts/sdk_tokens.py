"""openai, elevenlabs, deepgram-sdk or cartesia: a token that the SDK creates with a key, and speech with the token."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

TEXT = "Good evening."


async def with_openai(url: str, key: str) -> None:
    from openai import AsyncOpenAI

    sockets = url.replace("http", "ws", 1)
    session = {"type": "realtime", "audio": {"output": {"voice": "serena"}}}
    made = await AsyncOpenAI(base_url=f"{url}/v1", api_key=key).realtime.client_secrets.create(
        expires_after={"anchor": "created_at", "seconds": 60}, session=session
    )
    assert (made.value[:3], made.session.type) == ("ek_", "realtime")
    client = AsyncOpenAI(base_url=f"{url}/v1", websocket_base_url=f"{sockets}/v1", api_key=made.value)

    async def speak() -> AsyncIterator[bytes]:
        async with client.realtime.connect(model="gpt-realtime") as socket:
            content = [{"type": "input_text", "text": TEXT}]
            item = {"type": "message", "role": "user", "content": content}
            await socket.send({"type": "response.create", "response": {"input": [item]}})
            async for event in socket:
                if event.type == "response.output_audio.delta":
                    yield event.delta.encode()
                if event.type == "response.done":
                    return

    await heard(speak)
    await heard(speak)  # until it expires
    await refused(client.realtime.client_secrets.create)


async def with_elevenlabs(url: str, key: str) -> None:
    from elevenlabs.client import AsyncElevenLabs, ElevenLabs
    from websockets.asyncio.client import connect

    issuing, sockets = AsyncElevenLabs(base_url=url, api_key=key), url.replace("http", "ws", 1)
    first, second = [(await issuing.tokens.single_use.create("tts_websocket")).token for _ in range(2)]
    client = ElevenLabs(base_url=url, api_key=first)
    client.text_to_speech._ws_base_url = sockets  # it is always wss:// otherwise

    def speak() -> bytes:
        return b"".join(client.text_to_speech.convert_realtime("serena", text=iter([TEXT]), output_format="pcm_24000"))

    assert await asyncio.to_thread(speak)
    await refused(lambda: asyncio.to_thread(speak))  # it was used
    path = f"{sockets}/v1/text-to-speech/serena/stream-input?single_use_token={second}"
    async with connect(path):
        pass
    await refused(lambda: connect(path).__aenter__())
    other = AsyncElevenLabs(base_url=url, api_key=(await issuing.tokens.single_use.create("tts_websocket")).token)
    await refused(lambda: other.tokens.single_use.create("tts_websocket"))


async def with_deepgram(url: str, key: str) -> None:
    from deepgram import AsyncDeepgramClient
    from deepgram.environment import DeepgramClientEnvironment
    from deepgram.speak.v1.types import SpeakV1Text

    sockets = url.replace("http", "ws", 1)
    at = DeepgramClientEnvironment(base=url, production=sockets, agent=sockets, agent_rest=url)
    made = await AsyncDeepgramClient(api_key=key, environment=at).auth.v1.tokens.grant(ttl_seconds=120)
    assert made.expires_in == 120
    client = AsyncDeepgramClient(access_token=made.access_token, environment=at)
    await heard(lambda: client.speak.v1.audio.generate(text=TEXT, model="serena"))

    async def speak() -> AsyncIterator[bytes]:
        async with client.speak.v1.connect(model="serena", encoding="linear16", sample_rate="24000") as socket:
            await socket.send_text(SpeakV1Text(text=TEXT))
            await socket.send_flush()
            async for message in socket:
                if isinstance(message, bytes):
                    yield message
                elif message.type == "Flushed":
                    return

    await heard(speak)
    await refused(client.auth.v1.tokens.grant)


async def with_cartesia(url: str, key: str) -> None:
    from cartesia import AsyncCartesia

    at = {"base_url": url, "websocket_base_url": url.replace("http", "ws", 1), "max_retries": 0}
    made = await AsyncCartesia(api_key=key, **at).access_token.create(expires_in=60, grants={"tts": True})
    client = AsyncCartesia(token=made.token, **at)
    wanted = {
        "model_id": "sonic-3",
        "voice": {"mode": "id", "id": "serena"},
        "output_format": {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24000},
    }

    async def generate() -> AsyncIterator[bytes]:
        answer = await client.tts.generate(transcript=TEXT, **wanted)
        yield await answer.read()

    async def speak() -> AsyncIterator[bytes]:
        async with client.tts.websocket_connect() as socket:
            context = socket.context(**wanted)
            await context.push(TEXT)
            await context.no_more_inputs()
            async for event in context.receive():
                if event.type == "chunk" and event.audio:
                    yield event.audio

    await heard(generate)
    await heard(speak)
    await refused(client.access_token.create)


async def heard(speak: Callable[[], AsyncIterator[bytes]]) -> None:
    assert b"".join([part async for part in speak()])


async def refused(ask: Callable[[], Awaitable[object]]) -> None:
    """With a 401, however the SDK tells it."""
    status = None
    try:
        await ask()
    except Exception as error:
        status = getattr(error, "status_code", None) or error.response.status_code  # type: ignore[attr-defined]
    assert status == 401, status


asyncio.run(globals()[f"with_{sys.argv[1]}"](sys.argv[2], sys.argv[3]))
