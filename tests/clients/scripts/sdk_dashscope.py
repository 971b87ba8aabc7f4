"""dashscope: its Realtime client, both generations of its SpeechSynthesizer, and the one over HTTP."""

import asyncio
import base64
import contextlib
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import version

import dashscope
from common import Order, Report, converse, pieces
from dashscope.audio import tts_v2
from dashscope.audio.http_tts import HttpSpeechSynthesizer
from dashscope.audio.qwen_tts_realtime import AudioFormat, QwenTtsRealtime, QwenTtsRealtimeCallback

MODEL, PCM = "cosyvoice-v3-flash", tts_v2.AudioFormat.PCM_24000HZ_MONO_16BIT


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


class Audio(tts_v2.ResultCallback):
    """The audio of a task, which comes on a thread of the SDK's; None is its end."""

    def __init__(self) -> None:
        self._loop, self.came = asyncio.get_running_loop(), asyncio.Queue()

    def on_data(self, data: bytes) -> None:
        self._pass(data)

    def on_complete(self) -> None:
        self._pass(None)

    def on_error(self, message: str) -> None:
        self._pass(RuntimeError(message))

    def _pass(self, came: bytes | RuntimeError | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be over
            self._loop.call_soon_threadsafe(self.came.put_nowait, came)


async def realtime(order: Order, text: str) -> AsyncIterator[tuple[bytes, int]]:
    events = Events()
    url = order.url.replace("http", "ws", 1) + "/api-ws/v1/realtime"
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


async def tasks(order: Order, text: str) -> AsyncIterator[tuple[bytes, int]]:
    audio = Audio()
    client = tts_v2.SpeechSynthesizer(
        model=MODEL, voice=order.voice, format=PCM, callback=audio, url=dashscope.base_websocket_api_url
    )
    for piece in pieces(text):
        await asyncio.to_thread(client.streaming_call, piece)
    client.async_streaming_complete()
    is_whole = False
    try:
        while (data := await audio.came.get()) is not None:
            if isinstance(data, RuntimeError):
                raise data
            yield data, 24000
        is_whole = True
    finally:
        if not is_whole:
            await asyncio.to_thread(client.streaming_cancel)
            assert client.get_response()["header"]["event"] == "task-finished", client.get_response()


def session(order: Order, text: str) -> Iterator[bytes]:
    """Version 2 of its API."""
    client = dashscope.Client(api_key="none", base_url=dashscope.base_http_api_url)
    asked = {"model": MODEL, "voice": order.voice, "format": "pcm", "sample_rate": 24000}
    with client.audio.tts.connect(**asked, ws_url=dashscope.base_websocket_api_url) as speaking:
        for piece in pieces(text):
            speaking.send_text(piece)
        speaking.stop()
        yield from speaking.audio_chunks()


def http(order: Order, text: str) -> Iterator[bytes]:
    parts = HttpSpeechSynthesizer.call(model=MODEL, text=text, voice=order.voice, audio_format="pcm", stream=True)
    for part in parts:
        if part.output.get("finish_reason") != "stop":  # the last one repeats all
            yield part.audio_data


def in_threads(
    speak: Callable[[Order, str], Iterator[bytes]],
) -> Callable[[Order, str], AsyncIterator[tuple[bytes, int]]]:
    async def speaking(order: Order, text: str) -> AsyncIterator[tuple[bytes, int]]:
        parts = speak(order, text)
        try:
            while (data := await asyncio.to_thread(next, parts, None)) is not None:
                yield data, 24000
        finally:
            parts.close()

    return speaking


SERVICES = {
    "dashscope": realtime,
    "dashscope-tasks": tasks,
    "dashscope-session": in_threads(session),
    "dashscope-http": in_threads(http),
}


async def main() -> None:
    order = Order()
    warnings.simplefilter("ignore")  # version 2 of the API is a preview
    dashscope.api_key = "none"
    dashscope.base_http_api_url = f"{order.url}/api/v1"
    dashscope.base_websocket_api_url = order.url.replace("http", "ws", 1) + "/api-ws/v1/inference"
    speak = SERVICES[order.service]
    await converse(order, Report(order, {"dashscope": version("dashscope")}), lambda text: speak(order, text))


asyncio.run(main())
