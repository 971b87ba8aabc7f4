"""Unmodified clients speak with a server: what they bring is understood as well as plain PCM is (`make clients`)."""

import json
import os
import statistics
import subprocess
import sys
import time
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from talkray_tools.recogniser import Recogniser, Whisper, plain_words, word_errors
from tests.clients.environments import FOLDER, command
from tests.clients.texts import TEXTS

SCRIPTS = Path(__file__).parent / "scripts"
VOICE = "nora"
TURNS = int(os.environ.get("TALKRAY_CLIENTS_TURNS", "20"))
INTERRUPTIONS = min(5, TURNS)
AS_WELL = 0.9  # of the words that are recognised in plain PCM
FRAMEWORK = ("openai", "deepgram", "deepgram-flux", "elevenlabs", "cartesia")
# What products and servers' own clients send, where there is no package to run.
SEQUENCES = (
    *("open-webui", "open-webui-realtime", "librechat", "sillytavern", "dify", "home-assistant", "simplismart"),
    *("vllm-omni", "vllm-omni-batch", "nari", "voxserve", "kokoro", "dashscope-rest"),
)
TELLS_WORDS, READS_WORDS = ("elevenlabs", "cartesia"), ("livekit", "pipecat")
# Rows whose client knows at an interruption which words have begun: LiveKit by the audio, Pipecat by the clock.
NAMING = [(framework, service) for framework in READS_WORDS for service in TELLS_WORDS]
STALLED_S = 0.1  # of audio that is late the clock knows nothing
ROWS = [
    *(("openai", "sdk_openai.py", "openai"), ("npm", "sdk.mjs", "openai-js"), ("npm", "sdk.mjs", "ai-sdk")),
    *(("livekit", "livekit_tts.py", service) for service in (*FRAMEWORK, "elevenlabs-v4", "simplismart")),
    *(("pipecat", "pipecat_tts.py", service) for service in FRAMEWORK),
    *(("livekit-js", "livekit.mjs", service) for service in ("openai", "deepgram", "elevenlabs")),
    *((name, f"sdk_{name}.py", name) for name in ("deepgram", "elevenlabs", "cartesia", "dashscope", "wyoming")),
    *(("dashscope", "sdk_dashscope.py", f"dashscope-{form}") for form in ("tasks", "session", "http")),
    *(("openai", "sdk_openai.py", service) for service in ("azure", "realtime")),
    ("npm", "sdk.mjs", "mistral"),
    *(("sequences", "sequences.py", service) for service in SEQUENCES),
]


@dataclass
class Plain:
    recognised: list[int]
    first_audio_s: list[float]


@pytest.fixture(scope="session")
def plain(server: str, transcriber: Whisper) -> Plain:
    recognised, first_audio_s = [], []
    for text in TEXTS[:TURNS]:
        began_s, pcm = time.perf_counter(), bytearray()
        asked = {"model": "tts-1", "input": text, "voice": VOICE, "response_format": "pcm"}
        with httpx.stream("POST", f"{server}/v1/audio/speech", json=asked, timeout=120) as response:
            for part in response.iter_raw():
                if not pcm:
                    first_audio_s.append(time.perf_counter() - began_s)
                pcm += part
        heard = transcriber.transcribe(np.frombuffer(pcm, "<i2").astype(np.float32) / 32768, 24000)
        recognised.append(in_order(plain_words(text), plain_words(heard)))
    return Plain(recognised, first_audio_s)


HEAD = ("client", "service", "turns", "interruptions", "words (of plain PCM's)", "first audio, ms (plain PCM)")


@pytest.fixture(scope="session")
def table() -> Iterator[list[tuple[object, ...]]]:
    """Rows of what was measured, which are printed in the end, also after Ctrl-C."""
    rows: list[tuple[object, ...]] = []
    yield rows
    lines = (f"| {' | '.join(map(str, row))} |" for row in (HEAD, len(HEAD) * ("---",), *rows))
    print("", *lines, sep="\n")


def in_order(wanted: Sequence[str], heard: Sequence[str]) -> int:
    """How many of the wanted words are heard, in their order: the longest common subsequence."""
    longest = [0] * (len(heard) + 1)
    for word in wanted:
        before = 0
        for at, other in enumerate(heard, start=1):
            before, longest[at] = longest[at], before + 1 if word == other else max(longest[at - 1 : at + 1])
    return longest[-1]


def samples(file: Path) -> tuple[np.ndarray, int]:
    """Of a WAV file, also of one that was streamed and does not know its length."""
    with wave.open(str(file)) as audio:
        rate = audio.getframerate()
        assert (audio.getnchannels(), audio.getsampwidth()) == (1, 2)
    return np.frombuffer(file.read_bytes()[44:], "<i2").astype(np.float32) / 32768, rate


@pytest.mark.parametrize(("environment", "script", "service"), ROWS, ids=[f"{row[0]}-{row[2]}" for row in ROWS])
def test_a_client_is_understood(
    server: str, plain: Plain, table: list[tuple[object, ...]], transcriber: Whisper,
    ears: Sequence[Recogniser], tmp_path: Path, environment: str, script: str, service: str,
) -> None:  # fmt: skip
    texts = TEXTS[:TURNS]
    num_interrupted = TURNS if (environment, service) in NAMING else INTERRUPTIONS
    order = {"url": server, "service": service, "voice": VOICE, "texts": texts, "interruptions": num_interrupted}
    order["python"] = sys.executable  # of Talkray, for what runs beside a server
    (tmp_path / "order.json").write_text(json.dumps({**order, "folder": str(tmp_path)}))
    arguments = [str(tmp_path / "order.json"), str(FOLDER / environment)]
    subprocess.run([*command(environment, SCRIPTS / script), *arguments], check=True, timeout=60 * TURNS + 60)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [turn["text"] for turn in report["turns"]] == texts
    recognised = []
    for turn in report["turns"]:
        wanted = plain_words(turn["text"])
        heard = plain_words(transcriber.transcribe(*samples(tmp_path / turn["file"])))
        recognised.append(in_order(wanted, heard))
        assert len(heard) <= 1.5 * len(wanted) + 3, f"more than was asked for: {heard}"
        assert turn["words"] or service not in TELLS_WORDS or environment not in READS_WORDS
        if turn["words"]:
            timed = plain_words(" ".join(turn["words"]))
            assert in_order(wanted, timed) >= 0.9 * len(wanted), timed
    if (environment, service) in NAMING:
        in_time = [each for each in report["interruptions"] if each["stalled_s"] <= STALLED_S]
        named = [off_by(each["words"], each["text"], *samples(tmp_path / each["file"]), ears) for each in in_time]
        print(f"words named at {len(named)} of {num_interrupted} interruptions, less those recognised: {named}")
        assert all(abs(words) <= 1 for words in named)
        stalls = ", ".join(f"{each['stalled_s']:.2f}" for each in report["interruptions"])
        assert len(named) >= num_interrupted / 2, f"too slow for a client that goes by the clock: late by {stalls} s"
    firsts_s = [turn["first_audio_s"] for turn in report["turns"]]
    first_s, plain_s = (statistics.median(each) for each in (firsts_s, plain.first_audio_s))
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    words = f"{sum(recognised)} of {sum(plain.recognised)}"
    firsts = f"{first_s * 1000:.0f} ({plain_s * 1000:.0f})"
    table.append((versions, service, len(texts), len(report["interruptions"]), words, firsts))
    assert sum(recognised) >= AS_WELL * sum(plain.recognised)


def off_by(named: Sequence[str], text: str, audio: np.ndarray, rate: int, ears: Sequence[Recogniser]) -> int:
    """How many more words of a text are said to have begun than are heard in the audio up to there, by the recogniser
    that agrees more.
    """
    words = plain_words(" ".join(named))
    assert words == plain_words(text)[: len(words)]
    heard = [plain_words(ear.transcribe(audio, rate)) for ear in ears]
    found = min((len(words) - count for each in heard for count in words_said(text, each)), key=abs)
    print(f"after {len(audio) / rate:.2f} s: told {words[-1:]}, heard {' / '.join(map(' '.join, heard))}: {found:+d}")
    return found


def words_said(text: str, heard: list[str]) -> list[int]:
    """How many words of the text may have been said: those of the beginnings of it that are the most like what was
    heard.
    """
    wanted = plain_words(text)
    errors = [word_errors(wanted[:count], heard) for count in range(len(wanted) + 1)]
    return [count for count, wrong in enumerate(errors) if wrong == min(errors)]
