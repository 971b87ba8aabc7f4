"""dashscope: its Realtime client, words as they are written."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import version

import dashscope
from common import Order, Report, converse, pieces
from dashscope.audio.qwen_tts_realtime import AudioFormat, QwenTtsRealtime, QwenTtsRealtimeCallback


class Events(QwenTtsRealtimeCallback):
    """Passes what comes on a thread of the SDK's to this loop."""

    def __init__(self) -> None:
        self._loop, self.came = asyncio.get_running_loop(), asyncio.Queue()

    def on_open(self) -> None:
        pass

    def on_close(self, close_status_code: object, close_msg: object) -> None:
        self.on_event({"type": "closed"})

    def on_event(self, message: dict) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be over
            self._loop.call_soon_threadsafe(self.came.put_nowait, message)


async def main() -> None:
    order = Order()
    dashscope.api_key = "none"
    url = order.url.replace("http", "ws", 1) + "/api-ws/v1/realtime"

    async def speak(text: str) -> AsyncIterator[tuple[bytes, int]]:
        events = Events()
        client = QwenTtsRealtime(model="qwen3-tts-flash-realtime", callback=events, url=url)
        await asyncio.to_thread(client.connect)
        try:
            client.update_session(voice=order.voice, response_format=AudioFormat.PCM_24000HZ_MONO_16BIT)
            for piece in pieces(text):
                client.append_text(piece)
            client.finish()
            while (event := await events.came.get())["type"] not in ("session.finished", "closed"):
                assert event["type"] != "error", event
                if event["type"] == "response.audio.delta":
                    yield base64.b64decode(event["delta"]), 24000
            assert event["type"] == "session.finished", "closed before the end"
        finally:
            client.close()

    await converse(order, Report(order, {"dashscope": version("dashscope")}), speak)


asyncio.run(main())
