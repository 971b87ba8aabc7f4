"""What products and servers' own clients send, from their source, where there is no package that could be run."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from importlib.metadata import version

import aiohttp
from common import Order, Report, converse, pieces

Pcm = AsyncIterator[tuple[bytes, int]]
SPEECH = "/v1/audio/speech"
RENDERER = "You are a text-to-speech renderer. Read the user's text aloud."


class Sequences:
    def __init__(self, order: Order, http: aiohttp.ClientSession) -> None:
        self._order, self._http = order, http
        name = order.service.replace("-", "_")
        self.speak = getattr(self, name, None) or self._product

    async def _product(self, text: str) -> Pcm:
        """One POST, as a product sends it, but for the format: there is no decoder of MP3 here."""
        voice, wav = self._order.voice, {"response_format": "wav"}
        body: dict[str, object] = {"input": text, "model": "tts-1", "voice": voice, **wav}
        headers = {"Authorization": "Bearer x"}
        match self._order.service:
            case "sillytavern":
                body, headers = body | {"speed": 1}, {"Authorization": "Bearer "}
            case "dify":
                body |= {"model": "gpt-4o-mini-tts", "instruction": None}
            case "home-assistant":
                body |= {"speed": 1.0}
            case "simplismart":
                body = {"text": text, "language": "English", "speaker": voice, "leading_silence": False}
                headers |= {"Accept": "audio/L16"}
        async for data in self._post(SPEECH, body, headers, header=0 if "text" in body else 44):
            yield data

    async def _post(self, path: str, body: object, headers: dict[str, str] | None = None, *, header: int = 0) -> Pcm:
        async with self._http.post(path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            async for data in answer.content.iter_any():
                header, data = max(0, header - len(data)), data[header:]
                yield data, 24000

    async def voxserve(self, text: str) -> Pcm:
        form = aiohttp.FormData({"text": text, "speaker": self._order.voice, "streaming": "true"})
        form.add_field("x_vector_only_mode", "false", content_type="text/plain")
        async with self._http.post("/generate", data=form) as answer:
            assert answer.status == 200, await answer.text()
            await answer.content.readexactly(44)
            async for data in answer.content.iter_any():
                yield data, 24000

    async def kokoro(self, text: str) -> Pcm:
        body = {"input": text, "voice": self._order.voice, "response_format": "pcm", "stream": True}
        async with self._http.post("/dev/captioned_speech", json=body) as answer:
            assert answer.status == 200, await answer.text()
            words = []
            while line := await answer.content.readline():
                told = json.loads(line)
                words += [word["word"] for word in told["timestamps"]]
                yield base64.b64decode(told["audio"]), 24000
            assert words == text.split(), words

    async def vllm_omni_batch(self, text: str) -> Pcm:
        body = {"voice": self._order.voice, "response_format": "pcm", "items": [{"input": text}]}
        async with self._http.post(f"{SPEECH}/batch", json=body) as answer:
            (result,) = (await answer.json())["results"]
        assert result["status"] == "success", result
        yield base64.b64decode(result["audio_data"]), 24000

    async def dashscope_rest(self, text: str) -> Pcm:
        path = "/api/v1/services/aigc/multimodal-generation/generation"
        body = {"model": "qwen3-tts-flash", "input": {"text": text, "voice": self._order.voice}}
        async with self._http.post(path, json=body, headers={"X-DashScope-SSE": "enable"}) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data:"):
                    yield base64.b64decode(json.loads(line[5:])["output"]["audio"]["data"]), 24000

    async def open_webui_realtime(self, text: str) -> Pcm:
        output = {"format": {"type": "audio/pcm", "rate": 24000}, "voice": self._order.voice}
        audio = {"input": {"turn_detection": None}, "output": output}
        session = {"type": "realtime", "output_modalities": ["audio"], "audio": audio, "instructions": RENDERER}
        content = [{"type": "input_text", "text": text}]
        asked = {"conversation": "none", "output_modalities": ["audio"], "instructions": RENDERER}
        asked["input"] = [{"type": "message", "role": "user", "content": content}]
        async with self._http.ws_connect("/v1/realtime?model=gpt-realtime") as socket:
            assert (await socket.receive_json())["type"] == "session.created"
            await socket.send_json({"type": "session.update", "session": session})
            assert (await socket.receive_json())["type"] == "session.updated"
            await socket.send_json({"type": "response.create", "response": asked})
            response_id = (await socket.receive_json())["response"]["id"]
            while (event := await socket.receive_json())["type"] != "response.done":
                assert event["type"] != "error", event
                if event["type"] == "response.output_audio.delta":
                    assert event["response_id"] == response_id
                    yield base64.b64decode(event["delta"], validate=True), 24000
            assert event["response"]["status"] == "completed"

    async def vllm_omni(self, text: str) -> Pcm:
        config = {"type": "session.config", "voice": self._order.voice, "response_format": "pcm", "stream_audio": True}
        messages = [config, *({"type": "input.text", "text": piece} for piece in pieces(text)), {"type": "input.done"}]
        async for pcm in self._binary("/v1/audio/speech/stream", messages, last="session.done"):
            yield pcm

    async def nari(self, text: str) -> Pcm:
        start = {"type": "request.start", "model": "tts-1", "voice": self._order.voice, "language": "auto"}
        parts = [{"type": "input_text.append", "sequence": at, "text": piece} for at, piece in enumerate(pieces(text))]
        messages = [start, *parts, {"type": "input_text.end", "sequence": len(parts)}]
        async for pcm in self._binary(f"{SPEECH}/ws", messages, last="response.done", protocols=("nari.speech.v1",)):
            yield pcm

    async def _binary(self, path: str, messages: list, *, last: str, protocols: tuple[str, ...] = ()) -> Pcm:
        async with self._http.ws_connect(path, protocols=protocols) as socket:
            for message in messages:
                await socket.send_json(message)
            async for received in socket:
                if received.type is aiohttp.WSMsgType.BINARY:
                    yield received.data, 24000
                    continue
                event = received.json()
                assert event["type"] != "error", event
                if event["type"] == last:
                    return
        raise AssertionError("closed before the end")


async def main() -> None:
    order = Order()
    async with aiohttp.ClientSession(order.url) as http:
        report = Report(order, {f"{order.service}'s requests by aiohttp": version("aiohttp")})
        await converse(order, report, Sequences(order, http).speak)


asyncio.run(main())
