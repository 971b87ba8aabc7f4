"""Simulate a language model that streams text during playback over Deepgram's Flux protocol, one turn per connection.

Times are measured from the first word, because an agent connects before its language model starts to write.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import aiohttp

from loadtest.recording import Recording, read_messages
from loadtest.settings import Settings
from loadtest.traces import Failure, PcmLayout

SAMPLE_RATE = 24000
_LISTEN_ON_S = 0.5


async def converse_live(session: aiohttp.ClientSession, settings: Settings, recording: Recording) -> None:
    """Send the recording's text word by word, and interrupt the speech if planned."""
    async with session.ws_connect(settings.live_url, headers=settings.headers, compress=0, max_msg_size=0) as socket:
        recording.trace.status, recording.trace.layout = 101, PcmLayout(SAMPLE_RATE)
        recording.begin()
        tasks = [asyncio.create_task(_write(socket, settings, recording))]
        heard = asyncio.Event()
        if recording.request.interrupt_s is not None:
            tasks.append(asyncio.create_task(_interrupt(socket, heard, recording)))
        try:
            await _listen(socket, heard, recording)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _write(socket: aiohttp.ClientWebSocketResponse, settings: Settings, recording: Recording) -> None:
    first, *rest = recording.request.text.split(" ")
    began_s = recording.clock.now_s()
    for number, word in enumerate([first, *(f" {word}" for word in rest)]):
        await asyncio.sleep(began_s + number / settings.words_per_s - recording.clock.now_s())
        await socket.send_json({"type": "Speak", "text": word})
    await socket.send_json({"type": "Flush"})


async def _interrupt(socket: aiohttp.ClientWebSocketResponse, heard: asyncio.Event, recording: Recording) -> None:
    """Simulate a user who interrupts after `interrupt_s` seconds of audio."""
    await heard.wait()
    assert recording.request.interrupt_s is not None
    await asyncio.sleep(recording.request.interrupt_s)
    played_s = min(recording.request.interrupt_s, recording.num_audio_bytes / 2 / SAMPLE_RATE)
    recording.trace.interrupted_s = recording.clock.now_s()
    offset = {"type": "time_ms", "value": round(1000 * played_s)}
    await socket.send_json({"type": "Interrupt", "playback_offset": offset})


async def _listen(socket: aiohttp.ClientWebSocketResponse, heard: asyncio.Event, recording: Recording) -> None:
    """Receive messages until the end of the turn. An interrupted turn ends once the remaining audio has been played."""
    async for message in read_messages(socket):
        if isinstance(message, bytes):
            recording.receive(message)
            heard.set()
        elif _is_over(message, recording):
            if recording.trace.interrupted_s is not None:
                await _listen_on(socket, recording)
            return
    recording.fail_closed(socket.close_code, before="the turn ended")


async def _listen_on(socket: aiohttp.ClientWebSocketResponse, recording: Recording) -> None:
    """Keep receiving, because audio can still arrive after the server has confirmed an interruption."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LISTEN_ON_S):
            async for message in read_messages(socket):
                if isinstance(message, bytes):
                    recording.receive(message)


def _is_over(event: Mapping[str, Any], recording: Recording) -> bool:
    match event.get("type"):
        case "Connected":
            recording.trace.request_id = event.get("request_id")
        case "SpeechMetadata" if recording.trace.interrupted_s is None:
            recording.check_complete()
            return True
        case "SpeechInterrupted":
            return True
        case "Warning" if event.get("code") == "NO_ACTIVE_SPEECH":
            return recording.trace.interrupted_s is not None  # the speech was already complete
        case "Error":
            refused = event.get("code") == "rate_limit_exceeded"
            kind = Failure.REFUSED if refused else Failure.BROKEN_BODY if recording.chunks else Failure.HTTP
            recording.fail(kind, str(event.get("description")))
            return True
    return False
