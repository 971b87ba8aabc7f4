"""Answer telephone calls over Twilio's media streams (mu-law at 8 kHz, over a WebSocket). Callers can interrupt.

    pip install aiohttp
    PORT=8080 python phone_bridge.py            # respond to the carrier's webhook with:
    <Response><Connect><Stream url="wss://YOUR_HOST/media"/></Connect></Response>

Talkray sends mu-law, so the bridge forwards the audio without conversion. The carrier returns a mark once it has
played the audio that precedes it. Call your speech recognizer and language model in `reply`, and verify your carrier's
signature in `call`.
"""

import asyncio
import base64
import json
import os
import sys
from collections.abc import AsyncIterator

try:
    import aiohttp
    from aiohttp import web
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is missing: pip install aiohttp")

TALKRAY = os.environ.get("TALKRAY_URL", "http://127.0.0.1:8000").replace("http", "ws", 1)
SPEECH = f"{TALKRAY}/v2/speak?model=flux-{os.environ.get('VOICE', 'nora')}-en&encoding=mulaw&sample_rate=8000"
BYTES_PER_MS = 8
LOUD = 1000  # mean level above which the caller is assumed to be speaking; the maximum is 32,124
SPEAKS_AFTER, SILENT_AFTER = 5, 30  # number of 20 ms packets
# Level of each mu-law byte according to G.711: a three-bit exponent and a four-bit mantissa.
LEVELS = [(((~byte & 15) << 3) + 132 << (~byte >> 4 & 7)) - 132 for byte in range(256)]


async def reply(said: bytes, heard: str) -> AsyncIterator[str]:
    """Yield pieces of the answer to the caller's speech (mu-law). `heard`: the part of the last turn that was heard."""
    yield f"You spoke for {len(said) / BYTES_PER_MS / 1000:.0f} seconds. "
    yield "Please go on, I am listening. "


class Call:
    """One call. `sent` and `played` count the bytes since the beginning of the call, excluding discarded audio."""

    def __init__(self, carrier: web.WebSocketResponse, speech: aiohttp.ClientWebSocketResponse) -> None:
        self.carrier, self.speech = carrier, speech
        self.stream = ""
        self.turn = 0  # number of interruptions; marks of earlier turns are ignored
        self.sent = self.played = 0  # bytes
        self.is_dropping = False  # whether the server is still sending audio for an interrupted turn
        self.heard = ""
        self.said = bytearray()
        self.loud = self.quiet = 0  # consecutive packets
        self.speaking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Handle the call until it ends."""
        passing_on = asyncio.create_task(self.pass_on())
        try:
            async for message in self.carrier:
                event = json.loads(message.data)
                match event["event"]:
                    case "start":
                        self.stream = event["start"]["streamSid"]
                        await self.say(greeting())
                    case "media":
                        await self.listen(base64.b64decode(event["media"]["payload"]))
                    case "mark":
                        turn, position = map(int, event["mark"]["name"].split(":"))
                        if turn == self.turn:  # the carrier also returns marks for discarded audio
                            self.played = position
                    case "stop":
                        break
        finally:
            passing_on.cancel()

    async def say(self, pieces: AsyncIterator[str]) -> None:
        async for piece in pieces:
            await self.speech.send_json({"type": "Speak", "text": piece})
        await self.speech.send_json({"type": "Flush"})

    async def pass_on(self) -> None:
        """Send audio to the carrier, with a mark after each part."""
        async for message in self.speech:
            if message.type is aiohttp.WSMsgType.BINARY:
                if self.is_dropping:
                    continue
                self.sent += len(message.data)
                await self.tell("media", media={"payload": base64.b64encode(message.data).decode()})
                await self.tell("mark", mark={"name": f"{self.turn}:{self.sent}"})
                continue
            told = json.loads(message.data)
            if told["type"] in ("SpeechInterrupted", "Warning"):
                self.is_dropping, self.heard = False, told.get("text_spoken", "")

    async def tell(self, event: str, **fields: object) -> None:
        await self.carrier.send_json({"event": event, "streamSid": self.stream, **fields})

    async def listen(self, packet: bytes) -> None:
        """Interrupt when the caller starts speaking, and answer when the caller falls silent again."""
        is_loud = sum(LEVELS[byte] for byte in packet) > LOUD * len(packet)
        self.loud, self.quiet = (self.loud + 1, 0) if is_loud else (0, self.quiet + 1)
        if self.loud == SPEAKS_AFTER and not self.said:
            await self.interrupt()
        if self.loud >= SPEAKS_AFTER or self.said:
            self.said += packet
        if self.said and self.quiet == SILENT_AFTER:
            said, self.said = bytes(self.said), bytearray()
            self.speaking = asyncio.create_task(self.say(reply(said, self.heard)))

    async def interrupt(self) -> None:
        """Discard the carrier's buffered audio and stop the server, which reports the heard part of the text."""
        if self.speaking is not None:
            self.speaking.cancel()
        self.turn, self.sent, self.is_dropping = self.turn + 1, self.played, True
        await self.tell("clear")
        offset = {"type": "time_ms", "value": self.played // BYTES_PER_MS}
        await self.speech.send_json({"type": "Interrupt", "playback_offset": offset})


async def greeting() -> AsyncIterator[str]:
    yield "Welcome to the harbour office. We are open from nine to five on every day of the week. "
    yield "Tell me how I can help you, you can interrupt me at any time."


async def call(request: web.Request) -> web.WebSocketResponse:
    carrier = web.WebSocketResponse()
    await carrier.prepare(request)
    headers = {"Authorization": f"Token {os.environ.get('TALKRAY_API_KEY', 'none')}"}
    try:
        async with aiohttp.ClientSession() as http, http.ws_connect(SPEECH, headers=headers) as speech:
            await Call(carrier, speech).run()
    except aiohttp.ClientError as error:
        print(f"{TALKRAY} does not respond ({error}). Start `talkray serve`, or set TALKRAY_URL", file=sys.stderr)
    return carrier


if __name__ == "__main__":
    app = web.Application()
    app.router.add_get("/media", call)
    web.run_app(app, host="127.0.0.1", port=int(os.environ.get("PORT", "8080")))
