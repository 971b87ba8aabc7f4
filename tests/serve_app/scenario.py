"""Plays the scenarios in data/records: lines that begin with `> ` are commands, and the others are what they show.

Time is virtual: it moves when nothing else can happen. Threads are function calls, and random ids are numbers.
"""

import asyncio
import base64
import json
import os
import random
import re
import secrets
import selectors
import shlex
import socket
import time
import wave
import zlib
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from io import BytesIO
from itertools import chain, count
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import anyio.to_thread
import numpy as np
import obstore
import pytest
from ray.serve._private.build_app import build_app as build
from ray.serve.handle import DeploymentHandle
from starlette.types import Message
from typer.testing import CliRunner

import deployments.errors
from deployments.protocol import FinishReason, ModelInfo, PcmChunk, Reading, Sampling, SynthesisRequest
from deployments.serving import metrics
from serve_app.api.application import create_api
from serve_app.api.context import without_read_ahead
from serve_app.api.request_record import RequestRecord
from serve_app.app import build_app
from serve_app.cli.key_file import create_key, limit_keys, revoke_keys
from serve_app.cli.main import cli
from serve_app.config import ApiSettings, AppConfig
from serve_app.config_file import read_config
from serve_app.extension import ExtensionState, Node
from serve_app.extensions.jobs.job_manager import JobManager
from serve_app.extensions.jobs.planning import resolver_of_jobs
from serve_app.extensions.jobs.segment_maker import SegmentMaker
from serve_app.extensions.live.live_text import LiveTexts
from serve_app.extensions.voices.extension import open_voices
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.speech.model_state import ModelState, ModelStatus
from serve_app.speech.replica_synthesizer import Deployed
from serve_app.speech.speech_models import SpeechModel, SpeechModels
from tests.clock import Clock
from tests.records import FOLDER, Record, shown
from tests.serve_app import asgi
from tests.serve_app.fake import BASE, FOLLOWED, VOICE_DESIGN, FakeSynthesizer

BEGIN_S = 1_060_000_000.0  # 2003-08-04, of the virtual clock: years that files and keys have by the real one are masked
TEN = ("chinese", "english", "french", "german", "italian", "japanese", "korean", "portuguese", "russian", "spanish")
CUSTOM = replace(FOLLOWED, name="Qwen/Own", voices=("serena", "vivian", "ryan"), fingerprint="f1")
CLONING = replace(BASE, name="Qwen/Base", languages=("english", "french"), sample_rate=16000, frame_samples=1280)
MODELS = {
    "custom": replace(CUSTOM, languages=("chinese", "english", "german", "japanese")),
    "base": replace(CLONING, fingerprint="f2"),
    "design": replace(VOICE_DESIGN, fingerprint="f3"),
    "english": replace(FOLLOWED, name="english", voices=("nora", "felix"), languages=TEN[1:2], spoken_form="english"),
    "poly": replace(FOLLOWED, name="poly", voices=("serena", "ryan"), languages=TEN),
}
_USUAL = {("client", "127.0.0.1"), ("rate", 24000.0), ("rate", 1.0)}  # of a record
_AUDIO = re.compile(r"[A-Za-z0-9+/]{60,}={0,2}")
_MASKS = (  # random ids are numbers; what depends on an encoder of audio, or on the real clock
    (r"(?<![0-9a-f.])0{6,}(?=[0-9a-f])", ""),
    (", client='address 127.0.0.1'", ""),
    (r"\b[0-9a-f]{64}\b", "SHA256"),
    (r'("version": )"[^"]*"', r"\1VERSION"),
    (r"ek_[\w.-]+", "TOKEN"),
    (r"Generic \w+ error.*", "REASON"),
    (r"((?:num_bytes|file_size|\"bytes\"|plan_bytes)\W{1,3}|You need |You have [0-9]+ jobs, |take )[0-9]+", r"\1N"),
    (r"\([0-9,]+ bytes\)", "(N bytes)"),
    (r"20[2-9][0-9]-[0-9-]+T[0-9:]+[+-][0-9:]{4,5}", "TIME"),
)
_UNSHOWN = {"content-length", "date", "x-request-id"}
_SYNTHETIC = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
_OF_STREAMS = {"cache-control": "no-cache", "x-accel-buffering": "no", "x-digital-source-type": _SYNTHETIC}
_EXACT = ("audio/pcm", "audio/basic", "audio/x-alaw-basic", "audio/x-float32")
_ENCODED = {b"Ogg": "ogg", b"fLa": "flac", b"ID3": "mp3", b"\x1aE\xdf": "webm", b"PK\x03": "zip", b"\xff\xf1": "aac"}
_ENCODED |= {b"\xff\xf3": "mp3", b"\xff\xfb": "mp3", b"RIFF": "wav"}


class Selector(selectors.DefaultSelector):
    """Moves the clock on instead of waiting."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(30.0 if timeout is None else 0.0)
        if not ready and timeout is not None and timeout > 0:
            self._clock.now_s += timeout
        return ready


class Loop(asyncio.SelectorEventLoop):
    """Virtual time; calls instead of threads; pairs of sockets instead of a network, where nothing is on its way."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(Selector(clock))
        self._virtual = clock
        self._servers: dict[int, Any] = {}
        self.num_unbound = 0  # of the next servers, which cannot start

    def time(self) -> float:
        return self._virtual.now_s

    def run_in_executor(self, executor: Any, call: Any, *args: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(call(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        if self.num_unbound:
            self.num_unbound -= 1
            raise OSError(24, "Too many open files")
        port = 4000 + len(self._servers)
        self._servers[port] = factory
        named = SimpleNamespace(getsockname=lambda: (host, port))
        return SimpleNamespace(sockets=[named], close=lambda: self._servers.pop(port, None), is_serving=lambda: False)

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        if port not in self._servers:
            raise ConnectionRefusedError(f"nothing listens on {port}")
        ours, theirs = socket.socketpair()
        await self.connect_accepted_socket(self._servers[port], theirs)
        return await super().create_connection(factory, sock=ours)


class Speaker(FakeSynthesizer):
    """Speaks a frame for each five characters, the first after 0.13 s and each other after 0.05 s."""

    def __init__(self, name: str, record: Record) -> None:
        super().__init__(MODELS[name])
        self._name, self._record = name, record
        self.plans: list[dict[str, Any]] = []  # of the next requests
        self.gate = asyncio.Event()  # no audio before it is set
        self.gate.set()

    async def describe(self) -> ModelInfo:
        several = {"name": self._name, "checkpoint": f"models/{self._name}"} if self.is_one_of_several else {}
        return replace(await super().describe(), **several)

    is_one_of_several = False

    async def synthesize(self, request: SynthesisRequest, info: object = None) -> AsyncGenerator[PcmChunk, None]:
        plan = self.plans.pop(0) if self.plans else {}
        self._record(f"  {self._name} speaks {_brief(request)[17:-1]}")
        number, reading = len(self.texts), None
        self.texts.append(request.text)
        ended = "abandoned"
        try:
            if request.mailbox is not None:
                reading = asyncio.create_task(self._read(request, number))
                await (asyncio.sleep(plan.get("hasty_s", 0.2)) if "hasty_s" in plan else reading)
                self._record(f"  {self._name} has read", self.texts[number])
            await asyncio.sleep(plan.get("delay_s", 0.13))
            await self.gate.wait()
            assert self.info is not None
            num_frames, size = plan.get("frames", -(-len(self.texts[number]) // 5)), self.info.frame_samples
            for frame in range(num_frames):
                if frame == plan.get("fails_at"):
                    raise _error(plan["error"])
                codes = np.full((1, self.info.num_code_groups), frame, np.int16)
                told = (Reading(frame, (5.0 * frame,)),)
                pcm = ((np.arange(frame * size, (frame + 1) * size) * 7919) % 6007 - 3003).astype("<i2").tobytes()
                marks = (*request.marks, ("spoken", time.time_ns())) if request.marks and not frame else ()
                yield PcmChunk(pcm, codes, 3 + frame, position=size * (frame + 1), readings=told, marks=marks)
                await asyncio.sleep(plan.get("frame_s", 0.05))
            if "error" in plan and plan.get("fails_at", num_frames) >= num_frames:
                raise _error(plan["error"])
            reason = FinishReason(plan.get("reason", "stop"))
            yield PcmChunk(b"", np.zeros((0, 16), np.int16), 3 + num_frames, reason, position=size * num_frames)
            ended = reason.value
        except Exception as error:
            ended = shown(error)
            raise
        finally:
            if reading is not None:
                reading.cancel()
            if ended != "stop":
                self._record(f"  {self._name} ends", ended, request.text)


def _brief(value: Any) -> str:
    """A dataclass without its defaults, and without what differs in each run."""
    if not is_dataclass(value) or isinstance(value, type):
        return shown(value)
    told = []
    for each in fields(value):
        item = getattr(value, each.name)
        if each.name not in ("marks", "port", "key") and shown(item) not in (shown(each.default), shown(Sampling())):
            told.append(f"{each.name}={_brief(item)}")
    return f"{type(value).__name__}({', '.join(told)})"


def _plain(value: Any) -> Any:
    """Without handles, which answer to every name and so look like anything."""
    match value:
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case tuple() | list():
            return tuple(map(_plain, value))
        case Deployed():
            return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return "a handle" if isinstance(value, DeploymentHandle) else value


class Raw(str):
    __repr__ = str.__str__


def _error(named: str) -> Exception:
    kind, _, rest = named.partition(" ")
    return getattr(deployments.errors, kind)(*json.loads(rest or "[]"))


class Book(ExtensionState):
    """The extension `records`: shows each record."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def receive(self, record: RequestRecord) -> None:
        usage, ms = record.usage, 10**6
        names = ("request_id", "method", "path", "dialect", "client", "key", "characters", "error", "trace")
        told = {name: getattr(record, name) for name in names}
        told |= {"finish": usage.finish_reason, "seed": usage.seed, "voice": usage.voice, "model": usage.model}
        told |= {"tokens": usage.input_tokens, "frames": usage.frames, "samples": usage.samples}
        told["rate"] = record.samples_per_s
        if record.method != "JOB":  # whose beginning is a real time
            told["ms"] = (record.ended_ns - record.received_ns) // ms
            told["first_ms"] = usage.first_audio_ns and (usage.first_audio_ns - record.received_ns) // ms
        told = {name: value for name, value in told.items() if value and (name, value) not in _USUAL}
        self._record("  record", *(Raw(f"{name}={shown(value)}") for name, value in told.items()))


class World:
    """One server, its clients and its fakes. Each command is a method."""

    def __init__(self, folder: Path, record: Record, clock: Clock) -> None:
        self.folder, self.record, self.clock = folder, record, clock
        self.names: dict[str, str] = {}
        self.sockets: dict[str, asgi.Connection] = {}
        self.connections: dict[str, asgi.Connection] = {}  # of requests in the background
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.last: Any = None
        self.values = defaultdict[str, list[float]](list)
        self.states: dict[str, ModelState] = {}
        self.running: dict[str, bool] = {}
        self.hooks: list[int] = []
        self.prefixes: dict[bytes, str] = {}  # of versions of voices
        self.shown: dict[str, str] = {}  # by long text: the command that it answered
        self._closing: list[Callable[[], Any]] = []

    async def do(self, line: str) -> None:
        self.record(f"> {line}")
        self.command = line
        line = re.sub(r"\$(\w+)", lambda match: self.names.get(match[1], match[0]), line)
        name, _, rest = line.partition(" ")
        try:
            if name in self.sockets:
                self._send(self.sockets[name], rest)
            elif len(name) == 1:
                self.record(f"{name} is closed")
            elif name.isupper():
                path, *parts = rest.split(" | ")
                await self._answer(name, path, parts)
            else:
                await getattr(self, f"on_{name}")(rest)
        except Exception as error:
            self.record("!", error)
        await asyncio.sleep(0.001)
        self._show_sockets()

    async def on_server(self, rest: str) -> None:
        wanted = json.loads(rest.replace("FOLDER", str(self.folder)) or "{}")
        await self.close()
        record, store = self.record, self.folder / "store"
        given = {"disclose_synthetic": True, **wanted.get("api", {})}
        given["voices"] = {"store": str(store), **given.get("voices", {})}
        if "keys" in wanted:
            given.setdefault("access", {})["keys_file"] = str(self.folder / "keys.json")
        settings = ApiSettings.model_validate(given)
        names = wanted.get("models", ["custom"])
        self.speakers = {name: Speaker(name, record) for name in names}
        Speaker.is_one_of_several = len(names) > 1
        routes = {name if len(names) > 1 else "": speaker for name, speaker in self.speakers.items()}
        self.states = {name: ModelState(ModelStatus.READY) for name in routes}
        self.running = dict.fromkeys(routes, True)
        node = Node(
            is_running=lambda model: self.running[model],
            is_ready=lambda: any(self.running.values()),
            scrape=lambda: b"# HELP ray_talkray_x X\nray_talkray_x 1\nray_talkray_usage_x{k='ada'} 2\nray_other 3\n",
            state=lambda model: self.states[model],
            sizes=lambda: {"Talker": (3, 2), "Codec": (5, 4)},
            forget=self._forget,
            replica="app#Ingress#7" if "logs" in wanted else "",
            log_folder=self.folder / "logs" if "logs" in wanted else None,
        )
        voices, texts = open_voices(settings.of(VoiceSettings), forget=self._forget), LiveTexts()
        speaking = {name: SpeechModel(speaker, settings.admission) for name, speaker in routes.items()}
        resolver = resolver_of_jobs(SpeechModels(speaking), settings, voices)
        book = Book(record if wanted.get("records", True) else Record())
        self.hindrance: str | None = None
        maker = SegmentMaker(routes, voices, book.receive)
        self.manager = JobManager(resolver, voices, maker, hindrance=lambda model: self.hindrance)
        opened = {
            "voices": voices,
            "live": texts,
            "jobs": self._call,
            **({} if "logs" in wanted else {"records": book}),
        }
        limits = {
            name: settings.admission.model_copy(update=wanted.get("admission", {}).get(name, {})) for name in routes
        }
        served = {name: (speaker, limits[name]) for name, speaker in routes.items()}
        self.api = create_api(served, settings, opened=opened, node=node)
        running = asyncio.create_task(self.manager.run()) if wanted.get("jobs") else None
        states = [state for state in self.api.state.opened.values() if isinstance(state, ExtensionState)]
        for state in states if wanted.get("follows", True) else ():
            state.follow()

        async def close() -> None:
            if running is not None:
                running.cancel()
                await asyncio.wait((running,))
            await texts.aclose()
            for state in states:
                state.close()
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in others:
                    task.cancel()
                await asyncio.wait(others)

        self._closing.append(close)

    async def close(self) -> None:
        for name in list(self.sockets):
            await self.sockets.pop(name).__aexit__()
        for task in self.tasks.values():
            task.cancel()
        while self._closing:
            await self._closing.pop()()

    async def _call(self, method: str, *arguments: object) -> object:
        return await getattr(self.manager, method)(*arguments)

    async def _forget(self, voices: tuple[bytes, ...]) -> None:
        if voices:
            self.record(
                "  forget",
                sorted(self.prefixes.setdefault(each, f"version {len(self.prefixes) + 1}") for each in sorted(voices)),
            )

    async def on_background(self, rest: str) -> None:
        """NAME METHOD PATH ...: a request that goes on."""
        name, method, more = rest.split(" ", 2)
        path, *parts = more.split(" | ")
        self.tasks[name] = asyncio.create_task(self._answer(method, path, parts, f"{name}: "))

    async def on_end(self, _: str) -> None:
        """The server ends."""
        await self.close()

    async def on_at(self, seconds: str) -> None:
        """The clock is moved to this second of the scenario, exactly."""
        await asyncio.sleep(float(seconds) - self.clock.now_s)
        self.clock.now_s = float(seconds)

    async def on_words(self, rest: str) -> None:
        """NAME COUNT LENGTH: the JSON of a lexicon"""
        name, number, length = rest.split()
        self.names[name] = json.dumps({f"{n:x<{length}}": "y" for n in range(int(number))})

    async def on_filler(self, rest: str) -> None:
        """NAME COUNT: so many letters"""
        name, number = rest.split()
        self.names[name] = "a" * int(number)

    async def on_secrets(self, rest: str) -> None:
        """new [first]: another secret signs tokens, in front of the first one or alone"""
        file = self.folder / "token-secrets"
        file.write_text("\n".join(["# signs", "n" * 64, *([file.read_text()] if "first" in rest else [])]))

    async def on_leave(self, name: str) -> None:
        self.connections[name].receive({"type": "http.disconnect"})

    async def _answer(self, method: str, path: str, parts: Any, title: str = "") -> None:
        headers, body = dict[str, str](), b""
        for part in parts:
            if part[0] in "{[":
                body = part.encode("utf-8", "surrogatepass")
                headers.setdefault("content-type", "application/json")
            elif part.startswith("raw "):
                body = part[4:].encode("utf-8", "surrogatepass")
            elif part.startswith("form "):
                body = self._form(part[5:])
                headers["content-type"] = "multipart/form-data; boundary=b0"
            else:
                name, _, value = map(str.strip, part.partition(":"))
                headers[name] = value * 300 if name == "long" else value
        async with asgi.http(without_read_ahead(self.api), method, path, headers=headers) as connection:
            for part, more in ((body[:99], True), (body[99:], False)) if len(body) > 99 else ((body, False),):
                connection.receive({"type": "http.request", "body": part, "more_body": more})
            if title:
                self.connections[title[:-2]] = connection
            try:
                answer = await connection.answer()
            except ValueError:
                self.record(f"{title}no answer")
                return
            except Exception as error:
                self.record(f"{title}!", error)
                return
        told = {name: value for name, value in answer.headers.items() if name not in _UNSHOWN}
        kind = told.pop("content-type", "")
        if _OF_STREAMS.items() <= told.items():
            told = {"usual": "headers", **{name: value for name, value in told.items() if name not in _OF_STREAMS}}
        self.record(f"{title}{answer.status} {kind} {' | '.join(f'{n}: {v}' for n, v in told.items())}".rstrip())
        self._show_body(kind, answer.content)

    def _form(self, fields: str) -> bytes:
        out = b""
        for field in re.split(r" (?=\w+=)", fields):
            name, _, value = field.partition("=")
            content, named = value.encode(), ""
            if value.startswith("@"):
                named = f'; filename="{value[1:]}"'
                content = self._file(value[1:])
            out += f'--b0\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + content + b"\r\n"
        return out + b"--b0--\r\n"

    def _file(self, name: str) -> bytes:
        """A recording such as tone-3.5 or one that the server gave before (`kept`), or else its name."""
        if name.startswith("tone-"):
            seconds, _, rate = name[5:].partition("-")
            return recording(float(seconds), int(rate or 24000))
        return self.kept if name == "kept" else name.encode()

    kept = b""

    def _show_body(self, kind: str, content: bytes) -> None:
        if not content or kind.startswith("text/html"):
            return
        if kind.startswith("application/json"):
            self.last = json.loads(content)
            text = _compact(self.last)
            first = self.shown.setdefault(text, self.command) if len(text) > 300 else self.command
            self.record(f"  {text}" if first == self.command else f"  as before: {first[:80]}")
        elif kind.startswith(("text/", "application/x-ndjson")):
            for line in content.decode().splitlines()[:60]:
                data = line.removeprefix("data: ")
                if data:
                    self.record(f"  {_compact(json.loads(data)) if data[0] == '{' else line[:300]}")
        else:
            self.kept = content
            is_exact = kind.startswith(_EXACT) and not re.search("speed|rate", self.command)
            self.record(f"  {_sound(content)}" + (f", checksum {zlib.crc32(content):08x}" if is_exact else ""))

    async def on_ws(self, rest: str) -> None:
        """NAME PATH | header: value | protocols a b"""
        name, place = rest.split(" ", 1)
        path, *parts = place.split(" | ")
        protocols = next((part.split()[1:] for part in parts if part.startswith("protocols ")), [])
        headers = dict(map(str.strip, part.split(":", 1)) for part in parts if not part.startswith("protocols "))
        if name in self.sockets:
            await self.sockets.pop(name).__aexit__()
        connection = asgi.websocket(self.api, path, headers=headers, subprotocols=protocols)
        self.sockets[name] = await connection.__aenter__()

    def _send(self, connection: asgi.Connection, rest: str) -> None:
        if rest in ("leaves", "closes"):
            connection.receive({"type": "websocket.disconnect", "code": 1000 if rest == "closes" else 1006})
        elif rest.startswith("bytes "):
            connection.receive({"type": "websocket.receive", "bytes": rest[6:].encode()})
        else:
            connection.receive({"type": "websocket.receive", "text": rest})

    def _show_sockets(self) -> None:
        for name, connection in list(self.sockets.items()):
            heard = b""
            while True:
                message: Message | None = connection._outgoing.get_nowait() if connection.has_sent else None
                if heard and (message is None or message.get("bytes") is None):
                    self.record(f"{name} {_sound(heard)}")
                    heard = b""
                if message is None:
                    break
                if message.get("bytes") is not None:
                    heard += message["bytes"]
                elif "text" in message:
                    self.last = json.loads(message["text"])
                    self.record(f"{name} {_compact(self.last)}")
                else:
                    told = {key: value for key, value in message.items() if value not in (None, [], ())}
                    if "headers" in told:
                        told["headers"] = [b": ".join(pair).decode() for pair in told["headers"]]
                    if "body" in told:
                        told["body"] = told["body"].decode()
                    self.record(f"{name} {told.pop('type')}", **told)
            if connection.task.done():
                self.record(f"{name} has ended", connection.task.exception())
                del self.sockets[name]

    async def on_wait(self, seconds: str) -> None:
        await asyncio.sleep(float(seconds))

    async def on_plan(self, rest: str) -> None:
        """MODEL {..}: how one of the next requests goes; see Speaker."""
        name, _, plan = rest.partition(" ")
        self.speakers[name].plans.append(json.loads(plan))

    async def on_recording(self, rest: str) -> None:
        """NAME FILE: base64 of a recording"""
        name, file = rest.split()
        self.names[name] = base64.b64encode(self._file(file)).decode()

    async def on_hold(self, name: str) -> None:
        self.speakers[name].gate.clear()

    async def on_release(self, name: str) -> None:
        self.speakers[name].gate.set()

    async def on_model(self, rest: str) -> None:
        """MODEL {..} changes its description; null: it is not ready."""
        name, _, changes = rest.partition(" ")
        told = json.loads(changes)
        self.speakers[name].info = None if told is None else replace(MODELS[name], **told)

    async def on_state(self, rest: str) -> None:
        """MODEL STATUS {..}: what the pools are said to be."""
        name, status, more = rest.split(" ", 2)
        route = name if len(self.speakers) > 1 else ""
        self.states[route] = ModelState(ModelStatus(status.replace("_", " ")), **json.loads(more))
        self.running[route] = status in ("ready", "asleep")

    async def on_unbound(self, number: str) -> None:
        """NUMBER: so many servers cannot start."""
        loop: Any = asyncio.get_running_loop()
        loop.num_unbound = int(number)

    async def on_hinder(self, reason: str) -> None:
        self.hindrance = reason or None

    async def on_store(self, what: str) -> None:
        """breaks, or mends: the folder is a file."""
        store, away = self.folder / "store", self.folder / "away"
        if what == "breaks":
            store.rename(away)
            store.write_text("")
        else:
            store.unlink()
            away.rename(store)

    async def on_files(self, pattern: str) -> None:
        for file in sorted(self.folder.glob(pattern)):
            name = file.relative_to(self.folder)
            told = [] if file.suffix not in (".json", ".jsonl") else map(json.loads, file.read_text().splitlines())
            self.record(f"  {name}", *(Raw(_compact(each)) for each in told))

    async def on_damage(self, rest: str) -> None:
        """PATTERN [TEXT]: replaces the files; without a text, deletes them."""
        pattern, _, text = rest.partition(" ")
        for file in self.folder.glob(pattern):
            file.write_text(text) if text else file.unlink()

    async def on_age(self, rest: str) -> None:
        """PATTERN SECONDS: the files are that old for the store's clock."""
        pattern, seconds = rest.split()
        for file in self.folder.glob(pattern):
            os.utime(file, (self.clock.now_s + BEGIN_S - float(seconds),) * 2)

    async def on_let(self, rest: str) -> None:
        """NAME PATH: remember a value of the last JSON."""
        name, path = rest.split()
        value = self.last
        for key in path.split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
        self.names[name] = str(value)

    async def on_key(self, rest: str) -> None:
        """create NAME {limits} | revoke NAME | limit NAME {limits} | reset KEYS: they have other secrets"""
        what, name, limits = (*rest.split(" ", 2), "{}")[:3]
        file, given = self.folder / "keys.json", json.loads(limits)
        if what == "create":
            self.names[name] = create_key(file, name, **given)
        elif what == "reset":
            file.write_text(re.sub(r'("sha256": *")..', r"\g<1>00", file.read_text()))
        else:
            changed = revoke_keys(file, name) if what == "revoke" else limit_keys(file, name, given)
            self.record(f"  {', '.join(key.id for key in changed)}")

    async def on_text(self, rest: str) -> None:
        """OPTIONS | TEXT: how it is read, with `\\n` for the end of a line"""
        options, _, text = rest.partition(" | ")
        body = {"input": text.replace("\\n", "\n"), "voice": "ryan", **json.loads(options or "{}")}
        async with asgi.http(self.api, "POST", "/v1/audio/text", body=body) as connection:
            told = json.loads((await connection.answer()).content)
        told = told.get("error", told)
        for name in ("object", "model", "markup", "sent", "type"):
            told.pop(name, None)
        if len(told.get("segments", ())) == 1 and told["segments"][0] == {
            "text": told["spoken"],
            "pause_s": 0.0,
            "speed": 1.0,
        }:
            del told["segments"]
        self.record(f"  {_compact({name: value for name, value in told.items() if value})}")

    async def on_write(self, rest: str) -> None:
        """FILE CONTENT, or a recording"""
        name, _, content = rest.partition(" ")
        (self.folder / name).write_bytes(self._file(content[1:]) if content[:1] == "@" else content.encode())

    async def on_config(self, rest: str) -> None:
        """The settings of a Serve config file with these arguments: the error, or what differs from the defaults."""
        file = self.folder / "config.yaml"
        file.write_text(f'{{"applications": [{{"args": {rest}}}]}}')
        for name, own in read_config(file).by_model().items():
            self.record(f"  {name} {_compact(own.model_dump(mode='json', exclude_defaults=True))}")

    async def on_app(self, rest: str) -> None:
        """The deployments of these settings, with their options and arguments."""
        for each in build(build_app(AppConfig.model_validate_json(rest)), name="app").deployments:
            told = {"workers": each.ray_actor_options, **each._deployment_config.model_dump(exclude_unset=True)}
            for name in ("request_router_config", "user_configured_option_names"):
                told.pop(name, None)
            if (scaling := told.pop("autoscaling_config", None)) is not None:
                scaling["policy"] = each._deployment_config.autoscaling_config.policy.policy_kwargs
                told |= {f"scaling {name}": value for name, value in scaling.items()}
            self.record(
                f"{each.name} is a {each.func_or_class.__name__}", *map(_plain, (*each.init_args, each.init_kwargs))
            )
            for name, value in told.items():
                self.record(f"  {name}", _plain(value))

    async def on_talkray(self, rest: str) -> None:
        """A command of the command line."""
        arguments = shlex.split(rest.replace("FOLDER", str(self.folder)))
        with ThreadPoolExecutor(1) as pool:  # it has an event loop of its own
            done = pool.submit(CliRunner().invoke, cli, arguments, env={"COLUMNS": "150"}).result()
        for line in done.output.splitlines():
            self.record(f"  {line.rstrip()}")
        if done.exit_code or done.exception:
            self.record(f"  exits with {done.exit_code}", *([done.exception] if done.exception else []))

    async def on_hook(self, rest: str) -> None:
        """STATUS ...: what the webhook answers the next calls; 0: it cannot be reached."""
        self.hooks += map(int, rest.split())

    @asynccontextmanager
    async def post(self, url: str, *, data: bytes, headers: dict[str, str], **options: object) -> AsyncIterator[Any]:
        status = self.hooks.pop(0) if self.hooks else 200
        self.record("  webhook", url, Raw(_compact(json.loads(data))), headers, **options)
        if not status:
            raise OSError("no route")
        yield SimpleNamespace(ok=status < 400, status=status)

    @asynccontextmanager
    async def session(self, **options: object) -> AsyncIterator["World"]:
        yield self

    async def on_metrics(self, _: str) -> None:
        for name, values in sorted(self.values.items()):
            self.record(f"  {name} {len(values)} x, last {values[-1]:.6g}, sum {sum(values):.6g}")
        self.values.clear()

    def measure(self, instrument: metrics.Instrument, value: float, **tags: str) -> None:
        named = f"{instrument.name.removeprefix('talkray_')}{shown(tags) if tags else ''}"
        self.values[named].append(value)


def recording(seconds: float, rate: int) -> bytes:
    """A WAV file of a tone that sounds all the time."""
    content = BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((240 * (np.arange(int(seconds * rate)) % 73 - 36)).astype("<i2").tobytes())
    return content.getvalue()


def _sound(content: bytes) -> str:
    encoded = next((name for magic, name in _ENCODED.items() if content.startswith(magic)), "")
    if encoded == "wav":
        return f"audio wav {content[20:36].hex()}"
    return f"audio {encoded}" if encoded else f"audio {len(content)} bytes"


def _compact(value: Any) -> str:
    def plain(each: Any) -> Any:
        match each:
            case dict():
                return {name: plain(item) for name, item in each.items()}
            case list():
                return [plain(item) for item in each]
            case str() if _AUDIO.fullmatch(each) and not set(each) <= set("0123456789abcdef"):
                return f"<{_sound(base64.b64decode(each))}>" if len(each) % 4 == 0 else "<long>"
            case float():
                return float(f"{each:.6g}")
        return each

    return json.dumps(plain(value), ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def play(name: str, folder: Path, patched: pytest.MonkeyPatch) -> None:
    """Play the commands of data/records/`name`.txt, and compare all of it."""
    clock, ids, drawn = Clock(), count(1), random.Random(17)
    record = Record((re.escape(str(folder)), "FOLDER"), *_MASKS)
    for name_of, scale in (("time", 1), ("monotonic", 1), ("perf_counter", 1), ("time_ns", 10**9)):
        begin = BEGIN_S if name_of.startswith("time") else 1000.0
        patched.setattr(time, name_of, partial(_now, clock, begin, scale))
    patched.setattr(secrets, "token_hex", lambda size=32: f"{next(ids):0{2 * size}x}")
    patched.setattr(secrets, "token_bytes", lambda size=32: next(ids).to_bytes(size))
    patched.setattr(secrets, "token_urlsafe", lambda size=32: f"{next(ids):0{-(-size * 4 // 3)}x}")
    patched.setattr(secrets, "randbits", lambda bits: drawn.getrandbits(min(bits, 12)))
    world = World(folder, record, clock)
    for instrument in metrics.INSTRUMENTS:
        patched.setattr(instrument, "record", partial(world.measure, instrument))

    patched.setattr(aiohttp, "ClientSession", world.session)
    patched.setattr(obstore, "list", partial(_listed, obstore.list))
    patched.setattr(anyio.to_thread, "run_sync", _run)
    patched.setattr(asyncio.events, "new_event_loop", partial(Loop, clock))

    async def run() -> None:
        try:
            for line in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines():
                if line.startswith("> "):
                    await world.do(line[2:])
                elif line.startswith("#"):
                    record(line)
        finally:
            await world.close()

    with (
        record.logs("serve_app"),
        record.logs("deployments"),
        asyncio.Runner(loop_factory=partial(Loop, clock)) as runner,
    ):
        runner.run(run())
    record.check(name)


def _listed(listed: Callable[..., Any], *args: Any) -> list[list[Any]]:
    """One batch, in an order that no file system decides."""
    return [sorted(chain.from_iterable(listed(*args)), key=itemgetter("path"))]


async def _run(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return call(*args)


def _now(clock: Clock, begin: float, scale: int) -> float:
    now = clock.now_s + begin
    return now if scale == 1 else round(now * 1e6) * (scale // 10**6)
