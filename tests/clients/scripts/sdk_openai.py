"""openai: as its documentation shows streaming, Azure's client, and the Realtime API."""

import asyncio
import base64
from collections.abc import AsyncIterator
from importlib.metadata import version

from common import Order, Report, converse
from openai import AsyncAzureOpenAI, AsyncOpenAI

VERSION = {"openai": version("openai")}


async def speak_http(order: Order, client: AsyncOpenAI) -> None:
    async def speak(text: str) -> AsyncIterator[tuple[bytes, int]]:
        asked = {"model": "tts-1", "voice": order.voice, "input": text, "response_format": "pcm"}
        async with client.audio.speech.with_streaming_response.create(**asked) as response:
            async for pcm in response.iter_bytes(4096):
                yield pcm, 24000

    await converse(order, Report(order, VERSION), speak)


async def speak_realtime(order: Order, client: AsyncOpenAI) -> None:
    async with client.realtime.connect(model="gpt-realtime") as socket:
        output = {"format": {"type": "audio/pcm", "rate": 24000}, "voice": order.voice}
        await socket.session.update(
            session={"type": "realtime", "output_modalities": ["audio"], "audio": {"output": output}}
        )

        async def speak(text: str) -> AsyncIterator[tuple[bytes, int]]:
            content = [{"type": "input_text", "text": text}]
            await socket.conversation.item.create(item={"type": "message", "role": "user", "content": content})
            await socket.response.create()
            is_whole = False
            try:
                async for event in socket:
                    if event.type == "response.output_audio.delta":
                        yield base64.b64decode(event.delta), 24000
                    elif event.type == "response.done":
                        assert event.response.status == "completed", event
                        is_whole = True
                        return
                    assert event.type != "error", event
            finally:
                if not is_whole:
                    await socket.response.cancel()
                    async for event in socket:
                        if event.type == "response.done":
                            break

        await converse(order, Report(order, VERSION), speak)


async def main() -> None:
    order = Order()
    if order.service == "azure":
        client = AsyncAzureOpenAI(azure_endpoint=order.url, api_version="2025-04-01-preview", api_key="none")
        await speak_http(order, client)
    elif order.service == "realtime":
        sockets = order.url.replace("http", "ws", 1)
        await speak_realtime(order, AsyncOpenAI(websocket_base_url=f"{sockets}/v1", api_key="none"))
    else:
        await speak_http(order, AsyncOpenAI(base_url=f"{order.url}/v1", api_key="none"))


asyncio.run(main())
