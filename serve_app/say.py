"""One utterance from a running server into a file."""

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import soundfile

from deployments.errors import InvalidRequest, TalkrayError

FORMATS = {".wav": "wav", ".mp3": "mp3", ".opus": "opus", ".ogg": "opus", ".aac": "aac", ".flac": "flac", ".pcm": "pcm"}
# Raw PCM has no header, AAC and streamed FLAC do not say how long they are.
_WITH_LENGTH = ("wav", "mp3", "opus")
# A long text may be spoken for minutes; silence on the line for this long means that something is wrong.
_READ_TIMEOUT_S = 120
_KEY_VARIABLE = "TALKRAY_API_KEY"


@dataclass(frozen=True, slots=True)
class Utterance:
    """What to say, into which file, in whose voice; no voice takes the first the server lists."""

    text: str
    file: Path
    voice: str | None = None


class RefusedError(TalkrayError):
    """The server did not speak; the message is the server's own."""


def speak(url: str, utterance: Utterance) -> str:
    """Fetch the speech; returns a line that tells what was written. Raises RefusedError and InvalidRequest."""
    audio_format = FORMATS.get(utterance.file.suffix.lower())
    if audio_format is None:
        raise InvalidRequest(f"{utterance.file}: its ending must be one of {', '.join(FORMATS)}")
    try:
        num_bytes = asyncio.run(_fetch(url.rstrip("/"), utterance, audio_format))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RefusedError(
            f"{url} does not answer as a Talkray server ({error}): start one with `talkray serve`"
        ) from None
    except OSError as error:
        raise RefusedError(f"{utterance.file} cannot be written: {error.strerror}") from None
    return f"wrote {utterance.file} ({_length(utterance.file, audio_format)}{num_bytes:,} bytes)"


def _length(file: Path, audio_format: str) -> str:
    """How long the audio is, where the format's header tells; raises RefusedError where it is no such file."""
    if audio_format not in _WITH_LENGTH:
        return ""
    try:
        return f"{soundfile.info(file).duration:.1f} s, "
    except soundfile.LibsndfileError:
        raise RefusedError(f"{file} is no {audio_format}: the server answered with something else") from None


async def _fetch(url: str, utterance: Utterance, audio_format: str) -> int:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_READ_TIMEOUT_S)
    key = os.environ.get(_KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        body = {"model": "qwen3-tts", "input": utterance.text, "response_format": audio_format, "stream": False}
        voice = utterance.voice or await _first_voice(session, url)
        if voice is not None:
            body["voice"] = voice
        async with session.post(f"{url}/v1/audio/speech", json=body) as answer:
            content = await answer.read()
            if answer.status != 200:
                raise RefusedError(_message(answer.status, content))
    utterance.file.write_bytes(content)
    return len(content)


async def _first_voice(session: aiohttp.ClientSession, url: str) -> str | None:
    """The first the server lists; None where the model has none to choose from."""
    async with session.get(f"{url}/v1/audio/voices", raise_for_status=True) as answer:
        voices = (await answer.json())["voices"]
        return str(voices[0]["id"]) if voices else None


def _message(status: int, content: bytes) -> str:
    try:
        return f"HTTP {status}: {json.loads(content)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"
