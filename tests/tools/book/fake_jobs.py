"""A server of jobs: each look at a job finishes some more of its parts, whose audio is a tone as long as their text."""

import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import soundfile

from tests.loadtest.servers import QuietHandler, running

RATE = 24000
CHAR_S = 0.02  # of audio


def tone(text: str, seed: int, gain: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Its length is the text's, its pitch follows from text and seed."""
    pitch = 200 + int.from_bytes(hashlib.sha256(f"{text} {seed}".encode()).digest()[:2]) % 400
    at_s = np.arange(round(CHAR_S * len(text) * RATE)) / RATE
    return (gain * np.sin(2 * np.pi * pitch * at_s)).astype(np.float32)


@dataclass
class FakeJobs:
    url: str = ""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)  # jobs by idempotency key
    asked: list[str] = field(default_factory=list)  # "METHOD path"
    per_look: int = 2  # parts that a look finishes
    stops_after: int | None = None  # parts, then it only says "running"
    status: str = "running"
    estimated: bool = False
    problems: dict[str, dict[str, Any]] = field(default_factory=dict)  # by text
    gains: dict[str, float] = field(default_factory=lambda: {"alloy": 0.1, "bob": 0.02})
    spoken: list[str] = field(default_factory=list)  # texts, as they were fetched
    outages: int = 0  # requests that get 503 before it answers again
    num_begun: int = 0
    ignored: str = ""  # header of a new job

    def create(self, body: dict[str, Any], key: str) -> dict[str, Any]:
        if self.keys.get(key) not in self.jobs:
            self.num_begun += 1
            self.keys[key] = f"job_{self.num_begun}"
            inputs = [{**{k: v for k, v in body.items() if k != "inputs"}, **part} for part in body["inputs"]]
            self.jobs[self.keys[key]] = {"inputs": inputs, "done": 0, "status": self.status}
        return self.state(self.keys[key])

    def state(self, job_id: str) -> dict[str, Any]:
        job = self.jobs[job_id]
        most = len(job["inputs"]) if self.stops_after is None else min(self.stops_after, len(job["inputs"]))
        if job["status"] == "running":
            job["done"] = min(job["done"] + self.per_look, most)
        if job["done"] == len(job["inputs"]):
            job["status"] = "completed"
        texts = [part["input"] for part in job["inputs"]]
        problems = [
            {"part": texts.index(text), "segment": 0, **told} for text, told in self.problems.items() if text in texts
        ]
        parts = {"total": len(texts), "done": job["done"]}
        told = {"id": job_id, "status": job["status"], "parts": parts, "problems": problems}
        return {
            **told, "audio_s": 1.0, "eta_s": 3.0,
            "reason": "the disk is full" if job["status"] == "failed" else None,
        }  # fmt: skip

    def audio(self, part: dict[str, Any], audio_format: str) -> bytes:
        self.spoken.append(part["input"])
        out = io.BytesIO()
        samples = tone(part["input"], part.get("seed", 0), self.gains.get(part.get("voice", ""), 0.1))
        soundfile.write(out, samples, RATE, format=audio_format)
        return out.getvalue()

    def words(self, part: dict[str, Any]) -> dict[str, Any]:
        text, at = part["input"], 0
        words = []
        for word in text.split():
            start = text.index(word, at)
            at = start + len(word)
            words.append({"word": word, "start": CHAR_S * start, "end": CHAR_S * at})
        whole = {"text": text, "start": 0.0, "end": CHAR_S * len(text), "finish_reason": "stop"}
        return {"words": words, "estimated": self.estimated, "duration_s": CHAR_S * len(text), "segments": [whole]}


@contextmanager
def running_jobs() -> Iterator[FakeJobs]:
    fake = FakeJobs()
    with running(_handler(fake)) as fake.url:
        yield fake


def _handler(fake: FakeJobs) -> type[BaseHTTPRequestHandler]:
    class Handler(QuietHandler, BaseHTTPRequestHandler):
        wbufsize = -1  # head and body are sent together

        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def do_DELETE(self) -> None:
            self._answer("DELETE")

        def _answer(self, method: str) -> None:
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, body = self._reply(method, content)
            ignored = {"x_ignored": fake.ignored} if status == 201 and fake.ignored else {}
            self.answer(status, body, content_type="application/json", **ignored)

        def _reply(self, method: str, content: bytes) -> tuple[int, bytes]:
            parts = urlsplit(self.path)
            fake.asked.append(f"{method} {parts.path}")
            if parts.path == "/v1/audio/voices":
                return 200, json.dumps({"voices": [{"id": "alloy"}]}).encode()
            if fake.outages:
                fake.outages -= 1
                return 503, b""
            _, job_id, *rest = [*parts.path.removeprefix("/v1/audio/jobs").split("/"), ""][:5]
            if method == "POST" and not job_id:
                return 201, json.dumps(fake.create(json.loads(content), self.headers["Idempotency-Key"])).encode()
            if job_id not in fake.jobs:
                return 404, json.dumps({"error": {"message": "no such job"}}).encode()
            return self._of_job(method, job_id, [each for each in rest if each], parse_qs(parts.query))

        def _of_job(self, method: str, job_id: str, rest: list[str], query: dict[str, list[str]]) -> tuple[int, bytes]:
            job = fake.jobs[job_id]
            if method == "DELETE":
                del fake.jobs[job_id]
                return 200, b"{}"
            if rest[:1] == ["resume"]:
                job["status"] = "running"
            if rest[:1] != ["parts"]:
                told = fake.state(job_id)
                return 200, json.dumps(told).encode()
            number = int(rest[1])
            if number >= job["done"]:
                return 409, json.dumps({"error": {"message": "not finished"}}).encode()
            if rest[2:] == ["words"]:
                return 200, json.dumps(fake.words(job["inputs"][number])).encode()
            return 200, fake.audio(job["inputs"][number], query["response_format"][0])

    return Handler
