"""livekit-agents with one of its plugins, used as its agents use it."""

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version

import aiohttp
from common import Order, Report, converse, pieces
from livekit.agents import tts as livekit_tts
from livekit.plugins import cartesia, deepgram, elevenlabs, openai, simplismart

AHEAD_S = 1.0  # its agents read all that comes; this much is enough
# ElevenLabs ends a context of a dialogue that is idle for 20 s. The plugin keeps it alive every 10 s.
IDLE_S = 21.0


def plugin(order: Order, http: aiohttp.ClientSession) -> livekit_tts.TTS:
    url, voice = order.url, order.voice
    match order.service:
        case "openai":
            return openai.TTS(base_url=f"{url}/v1", api_key="none", voice=voice)
        case "deepgram":
            return deepgram.TTS(base_url=f"{url}/v1/speak", api_key="none", model=voice, http_session=http)
        case "deepgram-flux":
            model = f"flux-{voice}-en"
            return deepgram.TTSv2(base_url=f"{url}/v2/speak", api_key="none", model=model, http_session=http)
        case "elevenlabs":
            return elevenlabs.TTS(base_url=f"{url}/v1", api_key="none", voice_id=voice, http_session=http)
        case "elevenlabs-v4":
            model = "eleven_v4"
            return elevenlabs.TTS(base_url=f"{url}/v1", api_key="none", voice_id=voice, model=model, http_session=http)
        case "cartesia":
            return cartesia.TTS(base_url=url, api_key="none", voice=voice, http_session=http)
        case "simplismart":
            address = f"{url}/v1/audio/speech"
            return simplismart.TTS(base_url=address, model="qwen-tts", api_key="none", voice=voice, http_session=http)
    raise ValueError(order.service)


async def main() -> None:
    order = Order()
    name = order.service.partition("-")[0]
    packages = ("livekit-agents", f"livekit-plugins-{name}")
    report = Report(order, {package: version(package) for package in packages})
    async with aiohttp.ClientSession() as http:
        tts = plugin(order, http)
        heard: list[tuple[str, float]] = []  # words, and the seconds of audio at which they begin
        idles = [IDLE_S] if order.service == "elevenlabs-v4" else []  # once, between two sentences

        async def speak(text: str) -> AsyncIterator[tuple[bytes, int]]:
            heard.clear()
            if not tts.capabilities.streaming:
                async with tts.synthesize(text) as stream:
                    async for event in stream:
                        yield bytes(event.frame.data), event.frame.sample_rate
                return
            async with tts.stream() as stream:
                for piece in pieces(text):
                    stream.push_text(piece)
                    if idles and piece.endswith(".") and not text.endswith(piece):
                        stream.flush()
                        await asyncio.sleep(idles.pop())
                stream.flush()
                stream.end_input()
                async for event in stream:
                    timed_words = event.frame.userdata.get("lk.timed_transcripts", [])
                    heard.extend((str(word).strip(), word.start_time) for word in timed_words)
                    yield bytes(event.frame.data), event.frame.sample_rate

        timed = tts.capabilities.streaming and tts.capabilities.aligned_transcript

        def words_by(heard_s: float) -> list[str]:
            return [word for word, begin_s in heard if begin_s <= heard_s]

        await converse(
            order,
            report,
            speak,
            words=lambda: [word for word, _ in heard] if timed else None,
            words_by=words_by if timed else None,
            ahead_s=AHEAD_S if timed else 0.0,
        )
        await tts.aclose()


if __name__ == "__main__":
    asyncio.run(main())
