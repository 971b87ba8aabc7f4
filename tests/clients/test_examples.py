"""docs/examples run as they are, against a server (`make examples`): what they say is understood."""

import asyncio
import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import av
import httpx
import numpy as np
import pytest
import soundfile
import soxr
from websockets.sync.client import ClientConnection, connect

from serve_app.cli.ray_settings import free_port
from serve_app.config import AdmissionSettings
from talkray_tools.recogniser import Whisper, plain_words
from tests.clients.environments import command
from tests.clients.fake_openai import ANSWER, STORY, fake_openai
from tests.clients.test_clients import SCRIPTS, VOICE, in_order, samples
from tests.e2e.black_box import serving
from tests.serve_app.cli.test_check_client import Server
from tests.serve_app.fake import BASE, FakeSynthesizer, utterance

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs/examples"
TALKRAY = Path(sys.executable).parent
WELL = 0.7  # of a short text's words: the recogniser misses some of the embedded voice


def is_heard(text: str, audio: np.ndarray, rate: int, transcriber: Whisper) -> bool:
    heard = plain_words(transcriber.transcribe(audio, rate))
    print(f"heard: {' '.join(heard)}")
    wanted = plain_words(text)
    return in_order(wanted, heard) >= WELL * len(wanted)


def pcm16(data: bytes) -> np.ndarray:
    return np.frombuffer(data[: len(data) // 2 * 2], "<i2").astype(np.float32) / 32768


def environment(server: str, **more: str) -> dict[str, str]:
    return {**os.environ, "TALKRAY_URL": server, "VOICE": VOICE, "PATH": f"{TALKRAY}:{os.environ['PATH']}", **more}


@contextmanager
def program(example: str, client: str, variables: dict[str, str], **pipes: int) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(command(client, EXAMPLES / example), env=variables, **pipes)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def said_at_16_khz(server: str, text: str, file: Path) -> str:
    asked = {"model": "tts-1", "input": text, "voice": "hugo", "response_format": "pcm", "sample_rate": 16000}
    response = httpx.post(f"{server}/v1/audio/speech", json=asked, timeout=120).raise_for_status()
    file.write_bytes(response.content)
    return str(file)


SAID = ("Please tell me a long story", "Stop and tell me what time it is now")  # without a pause


@pytest.mark.parametrize("framework", ["livekit", "pipecat"])
def test_an_agent_is_interrupted_by_a_voice(server: str, transcriber: Whisper, tmp_path: Path, framework: str) -> None:
    said = [said_at_16_khz(server, text, tmp_path / f"said-{number}.pcm") for number, text in enumerate(SAID)]
    order = {"folder": str(tmp_path), "examples": str(EXAMPLES), "said": said, "port": free_port()}
    (tmp_path / "order.json").write_text(json.dumps(order))
    driver = [*command(framework, SCRIPTS / f"example_{framework}.py"), str(tmp_path / "order.json")]
    with fake_openai(SAID) as (openai_url, asked):
        variables = environment(server, OPENAI_URL=openai_url, OPENAI_API_KEY="none", PORT=str(order["port"]))
        if framework == "pipecat":
            with program("pipecat_agent.py", "pipecat", variables):
                subprocess.run(driver, check=True, timeout=240, env=variables)
        else:
            subprocess.run(driver, check=True, timeout=240, env=variables)
    report = json.loads((tmp_path / "report.json").read_text())
    print(f"{framework}: silence {report['silence_s']:.2f} s after the caller began")
    story, answer = (samples(tmp_path / f"answer-{number}.wav") for number in range(2))
    assert report["cut"] == [True, False]
    assert report["silence_s"] < 2.5
    assert 1.4 < len(story[0]) / story[1] < 8, "the story takes 20 s"
    assert is_heard(ANSWER, *answer, transcriber)
    kept = [str(message["content"]) for message in asked[-1] if message["role"] == "assistant"]
    print(f"kept of the story: {kept[-1:]}")
    assert kept, "the language model knows nothing of its first answer"
    assert len(kept[-1]) < len(STORY) / 2


def test_a_chat_speaks_and_is_interrupted(server: str, transcriber: Whisper) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with fake_openai() as (openai_url, _):
        variables = environment(server, LLM_URL=openai_url)
        with program("speaking_chat.py", "sequences", variables, **pipes) as chat:
            assert chat.stdin is not None
            assert chat.stdout is not None
            chat.stdin.write(b"Tell me a story.\n")
            chat.stdin.flush()
            story = chat.stdout.read(48000)
            chat.stdin.write(b"What time is it?\n")
            chat.stdin.close()
            rest = chat.stdout.read()
            chat.stdout.close()
            assert chat.wait(60) == 0
    audio = pcm16(story + rest)
    assert len(audio) / 24000 < 12, "the story alone takes 20 s"
    assert is_heard(ANSWER, audio[-4 * 24000 :], 24000, transcriber)


# The level of each mu-law byte.
MU_LAW = np.array(
    [
        (-1 if byte < 128 else 1) * ((((~byte & 15) << 3) + 132 << (~byte >> 4 & 7)) - 132) / 32768
        for byte in range(256)
    ],
    dtype=np.float32,
)
SILENCE, LOUD = b"\xff" * 160, bytes(0x20 if index % 16 < 8 else 0xA0 for index in range(160))


@dataclass
class Carrier:
    """The far end of a media stream: a caller who is silent or loud, and who plays what comes, in real time."""

    socket: aiohttp.ClientWebSocketResponse
    heard: bytearray = field(default_factory=bytearray)
    cleared_s: list[float] = field(default_factory=list)
    is_loud: bool = False
    _buffer: list[tuple[float, dict[str, object]]] = field(default_factory=list)  # when each mark is reached

    async def talk(self) -> None:
        start = {"streamSid": "MZ1", "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1}}
        await self.socket.send_json({"event": "connected", "protocol": "Call", "version": "1.0.0"})
        await self.socket.send_json({"event": "start", "streamSid": "MZ1", "start": start})
        due_s = time.perf_counter()
        while True:
            due_s += 0.02
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            payload = base64.b64encode(LOUD if self.is_loud else SILENCE).decode()
            await self.socket.send_json({"event": "media", "streamSid": "MZ1", "media": {"payload": payload}})
            while self._buffer and self._buffer[0][0] <= time.perf_counter():
                await self.socket.send_json(self._buffer.pop(0)[1])

    async def listen(self) -> None:
        plays_until_s = 0.0
        async for message in self.socket:
            event = json.loads(message.data)
            now_s = time.perf_counter()
            match event["event"]:
                case "media":
                    assert event["streamSid"] == "MZ1"
                    audio = base64.b64decode(event["media"]["payload"])
                    self.heard += audio
                    plays_until_s = max(plays_until_s, now_s) + len(audio) / 8000
                case "mark":
                    self._buffer.append((plays_until_s, event))
                case "clear":
                    self.cleared_s.append(now_s)
                    del self.heard[len(self.heard) - max(0, int((plays_until_s - now_s) * 8000)) :]
                    for _, mark in self._buffer:
                        await self.socket.send_json(mark)
                    self._buffer, plays_until_s = [], now_s


async def a_call(port: int) -> tuple[Carrier, float, int]:
    """The carrier, when the caller became loud, and how much was heard by the end of the interruption."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        while True:
            try:
                socket = await http.ws_connect(f"http://127.0.0.1:{port}/media")
                break
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)
        carrier = Carrier(socket)
        tasks = [asyncio.create_task(each) for each in (carrier.talk(), carrier.listen())]
        while len(carrier.heard) < 8000:
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.5)  # the caller listens
        carrier.is_loud, loud_s = True, time.perf_counter()
        await asyncio.sleep(1.0)
        carrier.is_loud, interrupted = False, len(carrier.heard)
        while len(carrier.heard) < interrupted + 8000:
            await asyncio.sleep(0.02)
        length = 0
        while len(carrier.heard) > length:  # to the end of the reply
            length = len(carrier.heard)
            await asyncio.sleep(1.5)
        await socket.send_json({"event": "stop", "streamSid": "MZ1"})
        await asyncio.wait(tasks[1:])
        tasks[0].cancel()
    return carrier, loud_s, interrupted


def test_a_telephone_call_is_interrupted(server: str, transcriber: Whisper) -> None:
    port = free_port()
    with program("phone_bridge.py", "sequences", environment(server, PORT=str(port))):
        carrier, loud_s, interrupted = asyncio.run(a_call(port))
    [cleared_s] = carrier.cleared_s
    assert cleared_s - loud_s < 0.5
    audio = MU_LAW[np.frombuffer(bytes(carrier.heard), np.uint8)]
    assert interrupted < 8000 * 5, "the greeting takes 9 s"
    assert is_heard("Welcome to the harbour office", audio[:interrupted], 8000, transcriber)
    assert is_heard("You spoke for 2 seconds. Please go on, I am listening.", audio[interrupted:], 8000, transcriber)


def run_script(name: str, folder: Path, server: str, *arguments: str) -> str:
    done = subprocess.run(
        ["sh", str(EXAMPLES / name), *arguments], cwd=folder, env=environment(server), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_audiobook(server: str, transcriber: Whisper, tmp_path: Path) -> None:
    run_script("audiobook.sh", tmp_path, server)
    with av.open(str(tmp_path / "harbour.m4b")) as book:
        chapters = [chapter["metadata"]["title"] for chapter in book.chapters()]
        rate = book.streams.audio[0].rate
        audio = np.concatenate([frame.to_ndarray()[0] for frame in book.decode(audio=0)])
    assert "The first ship" in chapters
    assert "Where is everybody?" in (tmp_path / "harbour.srt").read_text().replace("\n", " ")
    wanted = "The ship came in at nine. Nobody had waited for it. The second ship came in at noon."
    assert is_heard(wanted, soxr.resample(audio, rate, 24000), 24000, transcriber)


def test_a_stored_voice_by_curl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is played: the embedded voice clones nobody."""
    monkeypatch.setenv("TALKRAY_DATA", str(tmp_path / "data"))
    model = FakeSynthesizer(replace(BASE, name="clones", checkpoint="clones"), script=utterance(10))
    hum = 0.3 * np.sin(np.arange(4 * 24000) * 0.05) * (np.arange(4 * 24000) // 4800 % 2)
    soundfile.write(tmp_path / "ada.wav", hum, 24000)
    with Server({"clones": (model, AdmissionSettings())}) as server:
        said = run_script("stored_voice.sh", tmp_path, server.url, "ada.wav", "What it says.")
    assert '"name":"ada"' in said.replace(" ", "")
    assert model.requests[0].text == "Good evening. This is my voice."
    assert (tmp_path / "ada.voice").stat().st_size > 1000
    assert (tmp_path / "ada.mp3").stat().st_size > 1000


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    names = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh"))
    assert [name for name in names if name not in text and name.removesuffix("_agent.py") not in text] == []


def received(socket: ClientConnection) -> bytes:
    """The next audio; none once all is spoken."""
    message = socket.recv(timeout=60)
    return message if isinstance(message, bytes) else b""


def test_the_dialect_of_a_house_is_loaded_from_outside(tmp_path: Path, transcriber: Whisper) -> None:
    text = "The lamps in the garden were lit."
    (tmp_path / "house.yaml").write_text('model: embedded\napi: {extensions: [default, "house_dialect:EXTENSION"]}\n')
    with serving(tmp_path, "--config", "house.yaml", environment={"PYTHONPATH": str(EXAMPLES)}) as server:
        url = f"http://127.0.0.1:{server.port}"
        answer = httpx.post(f"{url}/house/say", json={"words": text, "who": VOICE}, timeout=60)
        assert answer.status_code == 200, answer.text
        with connect(f"ws://127.0.0.1:{server.port}/house/live?who={VOICE}") as socket:
            assert json.loads(socket.recv(timeout=60)) == {"type": "ready"}
            for word in text.split(" "):
                socket.send(json.dumps({"type": "words", "words": f"{word} "}))
            socket.send(json.dumps({"type": "over"}))
            told = list(iter(lambda: received(socket), b""))
    audio, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
    assert is_heard(text, audio, rate, transcriber)
    assert is_heard(text, pcm16(b"".join(told)), 24000, transcriber)


EDITS = {  # as docs/add-extension.md describes
    "serve_app/extensions/__init__.py": ('    "native",', '    "acme",\n    "native",'),
    "docs/extensions.md": ("| `native` |", "| `acme` | Acme's API | `live` |\n| `native` |"),
    "docs/dialects.md": ("- **nari**", "- **Acme**: `WS /acme/live`, `POST /acme/say`\n- **nari**"),
    "docs/clients.md": ("dialects of Deepgram", "dialects of Acme, Deepgram"),
}


def test_the_dialect_of_a_house_passes_the_shared_tests_as_a_part_of_talkray(tmp_path: Path) -> None:
    tree = shutil.copytree(ROOT, tmp_path / "tree", ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
    (tree / "serve_app/extensions/acme").mkdir()
    for example, place in {
        "house_dialect.py": "serve_app/extensions/acme/extension.py",
        "house_rows.py": "tools/suites/rows/acme.py",
    }.items():
        text = (EXAMPLES / example).read_text(encoding="utf-8")
        (tree / place).write_text(text.replace("house", "acme").replace("House", "Acme"), encoding="utf-8")
    for place, (before, after) in EDITS.items():
        text = (tree / place).read_text(encoding="utf-8")
        (tree / place).write_text(text.replace(before, after, 1), encoding="utf-8")
    suites = ["tests/serve_app/test_extension.py", "tests/serve_app/extensions", "tests/fuzz"]
    tests = [sys.executable, "-m", "pytest", "-q", "-k", "acme or document", *suites]
    done = subprocess.run(
        tests, cwd=tree, env=os.environ | {"PYTHONPATH": f"{tree}:{tree / 'tools'}"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 60
