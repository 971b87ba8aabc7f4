"""State shared by the parts of a report: options, the server, `talkray verify` checks, and recordings to clone."""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import aiohttp
import numpy as np
import soundfile
import soxr

from deployments.protocol import Sampling
from deployments.weights.store import locate
from loadtest.arrivals import ScheduledRequest
from loadtest.clients import open_session, speak
from loadtest.recording import Recording
from loadtest.settings import Settings
from loadtest.traces import Clock
from serve_app.text.languages import language_name
from talkray_tools.listening_session import connected
from talkray_tools.plan.measure import serving
from talkray_tools.recogniser import Recogniser
from talkray_tools.report.frame import CannotRun
from talkray_tools.verify import Check
from talkray_tools.ways import PLAIN, RATE, Asked, Audio, UtteranceFailed, Way, plain_pcm

_MARK = "TALKRAY_REPORT"  # environment variable set in every process of the report's server
_SPEAKERS, _QUICK_SPEAKERS = 8, 4  # number of the embedded voice's speakers to clone
_DESCRIPTION = "A calm, friendly voice."
_RECORDED = ("He had never grown accustomed to the work, and so he left the town.", "The garden behind it was quiet.")


@dataclass(frozen=True, slots=True)
class Recorded:
    """Recording to clone: [samples] at RATE, and their transcript."""

    audio: Audio
    text: str

    @classmethod
    def read(cls, file: Path, text: str) -> "Recorded":
        """Read a recording. Raises OSError and soundfile.LibsndfileError."""
        audio, rate = soundfile.read(file, dtype="float32", always_2d=True)
        return cls(_at_rate(audio.mean(axis=1), rate), text)

    @property
    def fields(self) -> dict[str, object]:
        """Return the request fields that clone the recording, including the transcript if there is one."""
        file = io.BytesIO()
        soundfile.write(file, self.audio, RATE, format="WAV")
        words = {"ref_text": self.text} if self.text else {"x_vector_only_mode": True}
        return {"ref_audio": f"data:audio/wav;base64,{base64.b64encode(file.getvalue()).decode()}", **words}


@dataclass(frozen=True, slots=True)
class SpeakingServer:
    """Running server. `start_s` is its startup time in seconds, or None if it was already running."""

    url: str
    start_s: float | None
    kind: str  # custom_voice, voice_design or base; empty if the server is not Talkray
    languages: tuple[str, ...]
    fields: dict[str, object]  # additional fields of every request


class ReportBench:
    """State shared by all parts. The server starts when a part first needs it."""

    def __init__(self, options: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> None:
        self.options, self.folder, self.say = options, folder, say
        self.raw = folder  # folder for the current part
        self.stack = ExitStack()
        self._token = secrets.token_hex(8)

    @cached_property
    def server(self) -> SpeakingServer:
        """Return the server, starting it if needed. Raises `StartError` and `CannotRun`."""
        url, started_s = self.options.url, time.monotonic()
        if url:
            return asyncio.run(self._describe(url.rstrip("/").removesuffix("/v1"), None))
        self.say("starting a server")
        url = self.stack.enter_context(serving(self.options.model, {_MARK: self._token}))
        return asyncio.run(self._describe(url, time.monotonic() - started_s))

    async def _describe(self, url: str, start_s: float | None) -> SpeakingServer:
        named = tuple(language_name(each) for each in self.options.language or ())
        voice = {"voice": self.options.voice} if self.options.voice else {}
        if self.options.dialect != "talkray":
            return SpeakingServer(url, start_s, "", named or ("english",), {"model": "tts-1", **voice})
        try:
            async with connected(url) as http:
                models, voices = [(await _json(http, f"/v1/{path}")) for path in ("models", "audio/voices")]
            model = next(each for each in models["data"] if "kind" in each)
        except (aiohttp.ClientError, TimeoutError, KeyError, StopIteration) as error:
            raise CannotRun(
                f"{url} does not list models and voices as Talkray does ({error or type(error).__name__}): start the "
                "server, set TALKRAY_API_KEY, or set --dialect"
            ) from error
        own = [each["id"] for each in voices["voices"] if each.get("type") not in ("alias", "stored")]
        fields: dict[str, object] = {"model": model["id"]} | ({"voice": own[0]} if own else {}) | voice
        if model["kind"] == "base":
            fields |= next(iter(self.recordings.values()))[0].fields
        elif model["kind"] == "voice_design":
            fields |= {"instructions": _DESCRIPTION}
        spoken = [each for each in model["languages"] if not each.endswith("_dialect") and each != "auto"]
        return SpeakingServer(url, start_s, model["kind"], named or tuple(spoken), fields)

    @property
    def settings(self) -> Settings:
        """Return the settings for a load test against the server."""
        key, options = os.environ.get("TALKRAY_API_KEY"), {"voice": "alloy", **self.server.fields}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return Settings(
            self.server.url, dialect=self.options.dialect, options=options, headers=headers, timeout_s=300.0
        )

    async def listen(self, http: aiohttp.ClientSession, asked: Asked) -> Audio:
        """Request raw PCM with the fields that the server's dialect accepts."""
        if self.options.dialect == "talkray":
            return await PLAIN.listen(http, asked)
        recording = Recording(ScheduledRequest(0, 0.0, asked.text), Clock.started())
        recording.kept = bytearray()
        settings = replace(self.settings, options={**self.settings.options, **asked.fields})
        async with open_session() as session:
            await speak(session, settings, recording=recording)
        trace = recording.finish()
        if trace.failure is not None or trace.layout is None:
            raise UtteranceFailed(f"{trace.cause}: {trace.error}")
        return _at_rate(plain_pcm(bytes(recording.kept)), trace.layout.sample_rate)

    def way(self, listen: Any, name: str = PLAIN.name, *, kept: Callable[[Asked], bool]) -> Way:
        """Return a `Way` that calls `listen` and stores the audio of each utterance for which `kept` is true."""

        async def keep(http: aiohttp.ClientSession, asked: Asked) -> Audio:
            audio: Audio = await listen(http, asked)
            if kept(asked):
                end = asked.told.get("finish_reason", "heard")
                soundfile.write(self.raw / f"{asked.fields.get('language')}-{asked.seed}-{end}.flac", audio, RATE)
            return audio

        return Way(name, keep, is_compared=False)

    def recogniser(self, language: str | None) -> Recogniser:
        """Return the recogniser that `--recogniser` names, or Whisper, for an ISO code. Raises ModuleNotFoundError."""
        made: Recogniser = resolve_name(self.options.recogniser or "talkray_tools.recogniser:Whisper")(language)
        return made

    @cached_property
    def recordings(self) -> dict[str, list[Recorded]]:
        """Recordings to clone by speaker: the user's, and two of each (synthetic) speaker of the embedded voice."""
        folder, own = self.folder / "recordings", self.options.reference
        found = {"yours": [Recorded.read(own, self.options.reference_text or "")]} if own else {}
        count = _QUICK_SPEAKERS if self.options.quick else _SPEAKERS
        names = sorted(file.name.removesuffix("-1.wav") for file in folder.glob("*-1.wav"))
        if len(names) < count:
            names = self._record(folder, count)
        for name in names[:count]:
            files = zip((folder / f"{name}-{take}.wav" for take in range(2)), _RECORDED, strict=True)
            found[name] = [Recorded.read(*pair) for pair in files]
        return found

    def _record(self, folder: Path, count: int) -> list[str]:
        from talkray_tools.subject import Subject  # imported late, because it imports torch

        self.say(f"generating recordings of {count} speakers to clone with the embedded voice")
        options = argparse.Namespace(device="cpu", threads=len(os.sched_getaffinity(0)), deterministic=False)
        subject = Subject(locate("embedded"), None, options)
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(subject.engine.info.voices)[:count]
        for name in names:
            requests = [subject.request(text, Sampling(), seed=seed) for seed, text in enumerate(_RECORDED)]
            for take, speech in enumerate(subject.speak(*(replace(each, voice=name) for each in requests))):
                soundfile.write(folder / f"{name}-{take}.wav", speech.pcm, RATE)
        return names

    @cached_property
    def verified(self) -> dict[str, Check]:
        """Checks of `talkray verify`, which runs in another process to free its memory. Raises `CannotRun`."""
        out = self.folder / "verify"
        if not (out / "verify.json").exists():
            directory = locate(self.options.model, report=lambda transfer: self.say(str(transfer)))
            command = [sys.executable, "-m", "talkray_tools.verify", "--model", str(directory), "--out", str(out)]
            command += ["--frames", "8"] if self.options.quick else []
            config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            if config.get("tts_model_type") == "base":
                recorded = next(iter(self.recordings.values()))[0]
                soundfile.write(out / "reference.wav", recorded.audio, RATE)
                command += ["--reference", str(out / "reference.wav")]
                command += ["--reference-text", recorded.text] if recorded.text and "talkray" not in config else []
            last = ""
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
                for line in process.stdout or ():
                    last = line.strip() or last
                    self.say(f"  {line.rstrip()}")
            if not (out / "verify.json").exists():
                end = "was killed, probably because memory ran out" if process.returncode < 0 else "ended early"
                raise CannotRun(f"talkray verify {end}: {last}")
        found = json.loads((out / "verify.json").read_text(encoding="utf-8"))["checks"]
        return {each["name"]: Check(**each) for each in found}

    def memory_gib(self) -> dict[str, float]:
        """Return the memory used by the report's own server in GiB: all its processes, and its GPU."""
        total_kib = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, StopIteration):
                if f"{_MARK}={self._token}".encode() in (folder / "environ").read_bytes():
                    lines = (folder / "smaps_rollup").read_text().splitlines()
                    total_kib += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        values = {"host_gib": total_kib / 2**20}
        with contextlib.suppress(OSError, subprocess.CalledProcessError, ValueError):
            gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]  # where the server's talker runs
            query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            values["gpu_gib"] = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) / 1024
        return values


def _at_rate(audio: Audio, rate: int) -> Audio:
    resampled: Audio = soxr.resample(audio, rate, RATE).astype(np.float32)
    return resampled


async def _json(http: aiohttp.ClientSession, path: str) -> dict[str, Any]:
    async with http.get(path, timeout=aiohttp.ClientTimeout(total=60)) as answer:
        answer.raise_for_status()
        found: dict[str, Any] = await answer.json()
        return found
