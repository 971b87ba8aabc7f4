"""Send one request to an OpenAI-compatible speech server, and record the audio as it arrives."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from loadtest.arrivals import LEAVES_S, RequestKind
from loadtest.dialects import SocketForm
from loadtest.live import converse_live
from loadtest.recording import REFUSED_STATUS, NotAudioError, Recording, pcm_layout, read_layout, read_messages
from loadtest.settings import Settings, Transport
from loadtest.traces import Failure, PcmLayout

MAX_ERROR_BYTES = 200
# Shorter than uvicorn's idle timeout of 5 s. A request on a closed connection would fail for reasons other than load.
KEEPALIVE_S = 2.0
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)  # `speak` applies its own timeout to every transport


@asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session that reuses connections and never queues a request for a free connection."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


async def speak(session: aiohttp.ClientSession, settings: Settings, *, recording: Recording) -> None:
    """Send the recording's request and record the complete response. Failures are recorded, not raised."""
    exchange = _exchange if settings.form.socket is None else _converse
    if settings.transport is Transport.LIVE:
        exchange = converse_live
    leaves = recording.request.kind is RequestKind.LEAVES
    try:
        async with asyncio.timeout(LEAVES_S if leaves else settings.timeout_s):
            await exchange(session, settings, recording)
    except TimeoutError:
        if leaves:
            recording.trace.left_s = recording.clock.now_s()
        else:
            recording.fail(Failure.TIMEOUT, f"no complete response within {settings.timeout_s:g} s")
    except aiohttp.WSServerHandshakeError as error:
        _fail_with_status(recording, error.status, message=error.message, headers=error.headers or {})
    except (aiohttp.ClientError, OSError) as error:
        answered = recording.trace.status is not None
        recording.fail(Failure.BROKEN_BODY if answered else Failure.CONNECTION, str(error) or type(error).__name__)
    except NotAudioError as error:
        recording.fail(Failure.NOT_AUDIO, str(error))


async def _exchange(session: aiohttp.ClientSession, settings: Settings, recording: Recording) -> None:
    body = settings.body(recording.request)
    content = {"data": as_form(body)} if settings.form.is_form else {"json": body}
    async with session.post(settings.speech_url, headers=settings.headers, timeout=NO_TIMEOUT, **content) as response:
        recording.trace.request_id = response.headers.get("X-Request-Id")
        if response.status != 200:
            message = error_message(await response.read())
            _fail_with_status(recording, response.status, message=message, headers=response.headers)
            return
        recording.trace.status = response.status
        if recording.trace.is_file:
            recording.receive_file(await response.read())
        elif settings.form.answers_wav:
            await recording.read_wav_header(response.content)
        else:
            recording.trace.layout = read_layout(response.headers)
        async for data in response.content.iter_any():
            recording.receive(data)
            if recording.request.kind is RequestKind.SLOW:
                await recording.keep_pace()
        recording.read_server_timing(response.headers.get("Server-Timing"))
        recording.check_complete()


def as_form(body: Mapping[str, object]) -> aiohttp.FormData:
    form = aiohttp.FormData(default_to_multipart=True)
    for name, value in body.items():
        form.add_field(name, str(value))
    return form


def _fail_with_status(recording: Recording, status: int, *, message: str, headers: Mapping[str, str]) -> None:
    recording.trace.status = status
    recording.trace.retry_after_s = retry_after(headers)
    recording.fail(Failure.REFUSED if status == REFUSED_STATUS else Failure.HTTP, message)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds in `retry-after-ms` or `Retry-After`, or None if neither is a number."""
    for name, per_second in (("retry-after-ms", 1000), ("Retry-After", 1)):
        with contextlib.suppress(KeyError, ValueError):
            return float(headers[name]) / per_second
    return None


async def _converse(session: aiohttp.ClientSession, settings: Settings, recording: Recording) -> None:
    form = settings.form.socket
    assert form is not None
    async with session.ws_connect(settings.speech_url, headers=settings.headers, compress=0, max_msg_size=0) as socket:
        for said in (*form.before, settings.body(recording.request), *form.after):
            await socket.send_json(said)
        recording.trace.layout = PcmLayout(24000, 1)
        async for message in read_messages(socket):
            if isinstance(message, bytes):
                recording.trace.status = 200
                recording.receive(message)
            elif not _heed(recording, message, form):
                return
    recording.fail_closed(socket.close_code, before="the audio ended")


def _heed(recording: Recording, event: Mapping[str, Any], form: SocketForm) -> bool:
    """Handle one JSON message of the WebSocket. Return False after the last message."""
    if "error" in event or event.get("type") == "Error":
        error = event["error"] if isinstance(event.get("error"), dict) else event
        kind = Failure.BROKEN_BODY if recording.chunks else Failure.HTTP
        if error.get("code") in ("rate_limit_exceeded", REFUSED_STATUS):  # as in HTTP, so tables count both
            kind, recording.trace.status = Failure.REFUSED, REFUSED_STATUS
        recording.fail(kind, str(error.get("message") or error.get("error") or error))
        return False
    recording.trace.status = 200
    recording.trace.request_id = event.get("request_id", recording.trace.request_id)
    if "sample_rate" in event:
        recording.trace.layout = pcm_layout(event["sample_rate"], event.get("channels", 1))
    if form.audio is not None and event.get(form.audio):
        try:
            samples = base64.b64decode(event[form.audio], validate=True)
        except (ValueError, TypeError) as error:
            raise NotAudioError(f"the audio in a message from the server is not valid base64: {error}") from error
        recording.receive(samples)
    name, value = form.over
    if event.get(name) != value:
        return True
    recording.check_complete()
    return False


def error_message(body: bytes) -> str:
    """Return the message from OpenAI's error envelope, or else the beginning of the body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:MAX_ERROR_BYTES].decode(errors="replace")
