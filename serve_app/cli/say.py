"""Find a running server, and write its speech to a file or play it."""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp
import soundfile

from deployments.errors import InvalidRequest, StartError, TalkrayError
from deployments.weights.store import cache_directory
from serve_app.api.headers import IGNORED_HEADER
from serve_app.audio.formats import AudioFormat

T = TypeVar("T")

FORMATS = {f".{name}": name for name in AudioFormat} | {".ogg": AudioFormat.OPUS}  # by file extension
STANDARD_OUTPUT = Path("-")
# Formats whose files state the duration. Raw PCM has no header; AAC and streamed FLAC do not contain the duration.
_WITH_LENGTH = ("wav", "mp3", "opus")
# Each player reads a WAV file of unknown length from its standard input.
_PLAYERS = (
    ("aplay", "-q", "-"),
    ("ffplay", "-nodisp", "-autoexit", "-loglevel", "error", "-i", "-"),
    ("mpv", "--really-quiet", "--no-video", "-"),
    ("play", "-q", "-t", "wav", "-"),
)
# Error output of players that exit with status 0 without playing. ALSA's library also reports errors if another device
# works.
_CANNOT = r"(?:could ?n[o']t|can(?: ?no|')t|failed to|unable to) (?:open|init|connect|find)"
_NOT_PLAYED = re.compile(
    rf"^(?!ALSA lib).*(?:{_CANNOT}|open failed|no (?:such|audio|sound|default)|device.*(?:busy|unavailable)|refused)",
    re.I | re.M,
)
# Speaking a long text may take minutes, but a gap of this length between two parts is an error.
_READ_TIMEOUT_S = 120
KEY_VARIABLE = "TALKRAY_API_KEY"
_KEYED = " asks for a key"  # marks a URL whose server requires a key


@dataclass(frozen=True, slots=True)
class SayRequest:
    """Text to speak, with its voice and style. The default voice is the first voice that the server lists."""

    text: str
    voice: str | None = None
    speed: float = 1.0
    instructions: str | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Size of the received audio, and a remark for the terminal."""

    num_bytes: int
    remark: str


class RefusedError(TalkrayError):
    """The server rejected the request. The message is the server's own."""


def write_speech(url: str, utterance: SayRequest, file: Path) -> str:
    """Download the speech to a file and return a line about the result. Raises RefusedError and InvalidRequest."""
    audio_format = "wav" if file == STANDARD_OUTPUT else FORMATS.get(file.suffix.lower())
    if audio_format is None:
        raise InvalidRequest(f"{file}: use one of the extensions {', '.join(FORMATS)}, or - for standard output")

    def write(content: bytes) -> None:
        try:
            if file == STANDARD_OUTPUT:
                sys.stdout.buffer.write(content)
                sys.stdout.buffer.flush()
            else:
                file.write_bytes(content)
        except OSError as error:
            raise RefusedError(f"{file} cannot be written: {error.strerror}") from None

    wrote = "replaced" if file.exists() else "wrote"
    fetched = _fetch(url, utterance, write, audio_format=audio_format)
    if file == STANDARD_OUTPUT:
        return f"wrote {fetched.num_bytes:,} bytes{fetched.remark}"
    return f"{wrote} {file} ({_length(file, audio_format)}{fetched.num_bytes:,} bytes){fetched.remark}"


def free_name(file: Path) -> Path:
    """Return `file`, or the first name such as speech-2.wav or speech-3.wav that does not exist."""
    names = chain([file], (file.with_stem(f"{file.stem}-{number}") for number in count(2)))
    return next(name for name in names if not name.exists())


def show_text(url: str, utterance: SayRequest) -> str:
    """Describe the spoken and omitted parts of the text, and its segments. Raises RefusedError."""
    fields = {"input": utterance.text, "voice": utterance.voice, "instructions": utterance.instructions}
    answer = ask(url, "/v1/audio/text", fields)
    left_out = [f"{each['what']} ({each['count']})" for each in answer["left_out"]]
    changed = [f"{each['written']!r} as {each['spoken']!r}" for each in answer["changed"]]
    segments = [
        (f"  {each['pause_s']:g} s of silence, then: " if each["pause_s"] else "  ")
        + each["text"]
        + (f" (style: {each['style']})" if "style" in each else "")
        for each in answer["segments"]
    ]
    lines = [f"sent:     {answer['sent']}", f"spoken:   {answer['spoken']}"]
    lines += [f"left out: {', '.join(left_out) or 'nothing'}", f"changed:  {', '.join(changed) or 'nothing'}"]
    return "\n".join([*lines, f"segments: {len(segments)}", *segments])


def play_speech(url: str, utterance: SayRequest) -> str:
    """Play the speech as it arrives, and return a line with the player's name. Raises RefusedError."""
    remarks: list[str] = []

    def speak(write: Callable[[bytes], object]) -> None:
        remarks.append(_fetch(url, utterance, write, audio_format="wav", stream=True).remark)

    name = play(speak)
    return f"played with {name}{''.join(remarks)}"


def play(speak: Callable[[Callable[[bytes], object]], object]) -> str:
    """Play the WAV file that `speak` writes, and return the player's name. Raises RefusedError."""
    command = next((player for player in _PLAYERS if shutil.which(player[0])), None)
    if command is None:
        players = ", ".join(player[0] for player in _PLAYERS)
        raise RefusedError(f"no audio player is installed. Install one of {players}, or write a file with -o")
    is_whole = False
    with _Player(command) as player, contextlib.suppress(BrokenPipeError):  # reported below
        speak(player.write)
        is_whole = True
    if failure := player.failure(is_whole=is_whole):
        raise RefusedError(f"{command[0]} {failure}. Write a file with -o, or check the sound device")
    return command[0]


def ask(url: str, path: str, fields: Mapping[str, object]) -> Any:
    """Return the JSON response to a POST of all `fields` that are not None. Raises RefusedError."""

    async def work() -> Any:
        body = {name: value for name, value in fields.items() if value is not None}
        async with _session() as session, session.post(url.rstrip("/") + path, json=body) as answer:
            if answer.status != 200:
                raise RefusedError(f"{url}: {http_message(answer.status, await answer.read())}")
            return await answer.json()

    return _asked(url, work())


def first_voice(url: str) -> str | None:
    """Return the first voice that the server lists, or None if the model has no named voices. Raises RefusedError."""

    async def work() -> str | None:
        async with _session() as session:
            return await _first_voice(session, url.rstrip("/"))

    return _asked(url, work())


class _Player:
    """Program that plays its standard input. It starts when the first audio arrives, because it would fail if the
    server rejected the request.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (an unread pipe would fill)
        self._said = ""

    def __enter__(self) -> Self:
        return self

    def write(self, audio: bytes) -> None:
        """Write audio. Raises BrokenPipeError once the program has stopped playing."""
        self._process = self._process or subprocess.Popen(self._command, stdin=subprocess.PIPE, stderr=self._errors)
        assert self._process.stdin is not None
        self._process.stdin.write(audio)

    def __exit__(self, *_: object) -> None:
        with self._errors:
            if self._process is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.communicate()
                self._errors.seek(0)
                self._said = self._errors.read().decode("utf-8", "replace").strip()

    def failure(self, *, is_whole: bool) -> str:
        """Return why the audio was not fully played, or "". ffplay exits with status 0 even without a device."""
        status = 0 if self._process is None else self._process.returncode
        if not status and is_whole and not _NOT_PLAYED.search(self._said):
            sys.stderr.write(f"{self._said}\n" if self._said else "")
            return ""
        ended = f"failed with status {status}" if status > 0 else "did not play all of the audio"
        ended = f"was killed by {signal.Signals(-status).name}" if status < 0 else ended
        return ended + (f": {' '.join(self._said.splitlines()[-3:])}" if self._said else "")


@contextlib.contextmanager
def announced(url: str, *, keyed: bool = False) -> Iterator[None]:
    """Within this context, let `find_server` find the server at `url`. `keyed`: the server requires a key.

    Raises OSError, or StartError if there is no home folder.
    """
    folder = _announcements()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in folder.iterdir():
        if not _is_held(left):
            left.unlink(missing_ok=True)
    file = folder / str(os.getpid())
    with file.with_name(f".{file.name}").open("w", encoding="utf-8") as announcement:
        fcntl.flock(announcement, fcntl.LOCK_EX)  # released however this process ends
        announcement.write(f"{url}{_KEYED if keyed else ''}")
        announcement.flush()
        Path(announcement.name).rename(file)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def find_server() -> str | None:
    """Return the base URL of the server that this user started last, or None if no server is running.

    If TALKRAY_API_KEY is not set, servers without keys are preferred.
    """
    with contextlib.suppress(OSError, StartError):  # the folder is missing, or a server has just ended
        files = sorted(_announcements().glob("[0-9]*"), key=lambda file: file.stat().st_mtime, reverse=True)
        servers = [file.read_text(encoding="utf-8") for file in files if _is_held(file)]
        if not os.environ.get(KEY_VARIABLE):
            servers.sort(key=lambda server: server.endswith(_KEYED))
        return servers[0].removesuffix(_KEYED) if servers else None
    return None


def running_server(url: str | None) -> str:
    """Return `url`, or the URL of the server on this machine. Raises StartError."""
    server = url or find_server()
    if server is None:
        raise StartError("no server is running on this machine: start one with `talkray serve`, or pass its URL")
    return server.rstrip("/")


def _announcements() -> Path:
    return cache_directory() / "servers"


def _is_held(file: Path) -> bool:
    """Return whether the process that wrote the announcement is alive."""
    with file.open() as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _length(file: Path, audio_format: str) -> str:
    """Return the duration of the audio if the file contains it. Raises RefusedError if the format is different."""
    if audio_format not in _WITH_LENGTH:
        return ""
    try:
        return f"{soundfile.info(file).duration:.1f} s, "
    except soundfile.LibsndfileError:
        raise RefusedError(f"{file} is not {audio_format}: the response has a different format") from None


def _fetch(
    url: str, utterance: SayRequest, write: Callable[[bytes], object], *, audio_format: str, stream: bool = False
) -> Fetched:
    """Pass the audio to `write`, as it arrives or all at once."""
    return _asked(url, _ask(url.rstrip("/"), utterance, write, audio_format=audio_format, stream=stream))


def _asked(url: str, work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RefusedError(
            f"{url} does not respond like a Talkray server ({error}): start one with `talkray serve`"
        ) from None


async def _ask(
    url: str, utterance: SayRequest, write: Callable[[bytes], object], *, audio_format: str, stream: bool
) -> Fetched:
    async with _session() as session:
        fields = {
            "model": "qwen3-tts",
            "input": utterance.text,
            "voice": utterance.voice or await _first_voice(session, url),
            "instructions": utterance.instructions,
            "speed": utterance.speed,
            "response_format": audio_format,
            "stream": stream,
        }
        body = {name: value for name, value in fields.items() if value is not None}
        async with session.post(f"{url}/v1/audio/speech", json=body) as answer:
            if answer.status != 200:
                raise RefusedError(f"{url}: {http_message(answer.status, await answer.read())}")
            num_bytes = 0
            async for part in answer.content.iter_any() if stream else _whole(answer):
                write(part)
                num_bytes += len(part)
            ignored = answer.headers.get(IGNORED_HEADER)
            return Fetched(num_bytes, f"; the server ignored {ignored}" if ignored else "")


def _session() -> aiohttp.ClientSession:
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_read=_READ_TIMEOUT_S), headers=headers)


async def _whole(answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    yield await answer.read()


async def _first_voice(session: aiohttp.ClientSession, url: str) -> str | None:
    """Return the first voice that the server lists, or None if the model has no named voices."""
    async with session.get(f"{url}/v1/audio/voices", raise_for_status=True) as answer:
        voices = (await answer.json())["voices"]
        return str(voices[0]["id"]) if voices else None


def http_message(status: int, content: bytes) -> str:
    remedy = f" Set {KEY_VARIABLE} to an API key, or select another server with --url." if status == 401 else ""
    try:
        return f"HTTP {status}: {json.loads(content)['error']['message']}{remedy}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}.{remedy}"
