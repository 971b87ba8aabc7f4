"""Chat with a language model and hear each answer while it is being written. A new question interrupts the answer.

    pip install aiohttp
    LLM_URL=http://127.0.0.1:11434/v1 LLM_MODEL=qwen3 python speaking_chat.py | aplay -q -f S16_LE -r 24000 -B 100000

The program reads questions from standard input, one per line. It writes text to standard error and audio (16-bit PCM)
to standard output. It works with any server that has OpenAI's /chat/completions, such as Ollama, vLLM or OpenAI.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator

try:
    import aiohttp
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is missing: pip install aiohttp")

TALKRAY = os.environ.get("TALKRAY_URL", "http://127.0.0.1:8000").replace("http", "ws", 1)
VOICE = os.environ.get("VOICE", "nora")
LLM_URL = os.environ.get("LLM_URL", "http://127.0.0.1:11434/v1")
LLM_MODEL = os.environ.get("LLM_MODEL", "qwen3")
# Other dialects' WebSockets accept streamed text too. Deepgram Flux also supports turns.
SPEECH = f"{TALKRAY}/v2/speak?model=flux-{VOICE}-en&encoding=linear16&sample_rate=24000"


async def written(http: aiohttp.ClientSession, messages: list[dict[str, str]]) -> AsyncIterator[str]:
    """Yield the language model's text piece by piece."""
    asked = {"model": LLM_MODEL, "messages": messages, "stream": True}
    headers = {"Authorization": f"Bearer {os.environ.get('LLM_KEY', 'none')}"}
    async with http.post(f"{LLM_URL}/chat/completions", json=asked, headers=headers) as response:
        response.raise_for_status()
        async for line in response.content:
            data = line.decode().removeprefix("data:").strip()
            if not data.startswith("{"):  # an empty line, or [DONE]
                continue
            for choice in json.loads(data)["choices"]:
                if piece := choice["delta"].get("content"):
                    yield piece


class SpeakingChat:
    """One conversation over one speech connection."""

    def __init__(self, http: aiohttp.ClientSession, speech: aiohttp.ClientWebSocketResponse) -> None:
        self.http, self.speech = http, speech
        self.messages = [{"role": "system", "content": "You are heard, not read: answer in short plain sentences."}]
        self.is_silent = False  # whether audio from an interrupted answer is still arriving

    async def answer(self, question: str) -> None:
        """Forward each piece to the speech server, which detects sentence boundaries."""
        self.messages.append({"role": "user", "content": question})
        text = ""
        try:
            async for piece in written(self.http, self.messages):
                text += piece
                print(piece, end="", file=sys.stderr, flush=True)
                await self.speech.send_json({"type": "Speak", "text": piece})
            await self.speech.send_json({"type": "Flush"})  # marks the end of the turn's text
        except aiohttp.ClientError as error:
            print(f"{LLM_URL} does not respond ({error}). Set LLM_URL and LLM_MODEL", file=sys.stderr)
        finally:
            print(file=sys.stderr)
            self.messages.append({"role": "assistant", "content": text})

    async def interrupt(self, answering: asyncio.Task[None]) -> None:
        answering.cancel()
        await asyncio.wait((answering,))
        self.is_silent = True
        await self.speech.send_json({"type": "Interrupt"})

    async def play(self) -> None:
        """Write audio until the connection ends."""
        async for message in self.speech:
            if message.type is aiohttp.WSMsgType.BINARY and not self.is_silent:
                sys.stdout.buffer.write(message.data)
                sys.stdout.buffer.flush()
            elif message.type is aiohttp.WSMsgType.TEXT:
                told = json.loads(message.data)
                if told["type"] in ("SpeechInterrupted", "Warning"):  # Warning: there was no speech to interrupt
                    self.is_silent = False
                if told["type"] == "Error":
                    sys.exit(f"{told['code']}: {told['description']}")


async def main() -> None:
    headers = {"Authorization": f"Token {os.environ.get('TALKRAY_API_KEY', 'none')}"}
    async with aiohttp.ClientSession() as http, http.ws_connect(SPEECH, headers=headers) as speech:
        chat, answering = SpeakingChat(http, speech), None
        playing = asyncio.create_task(chat.play())
        while question := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if answering is not None:
                await chat.interrupt(answering)
            answering = asyncio.create_task(chat.answer(question))
        if answering is not None:
            await answering
        await speech.send_json({"type": "Close"})  # the server finishes speaking and closes the connection
        await playing


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except aiohttp.ClientError as error:
        sys.exit(f"{TALKRAY} does not respond ({error}). Start `talkray serve`, or set TALKRAY_URL")
