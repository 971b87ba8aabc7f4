"""A stand-in of the Hugging Face hub on this machine, for its real client: HF_ENDPOINT names it.

It has the routes that a download meets: the description of a repository, its tree, `resolve`, which sends whoever wants
a large file to another host, and that host, which knows ranges. What goes wrong on the way is said to it.
"""

import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.loadtest.servers import QuietHandler, running

NAME = "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"
WEIGHTS = "model-00001-of-00002.safetensors"
COMMIT = "a" * 40
BOUND_S = 60
_LARGE = 100_000  # git LFS keeps such files, and all safetensors


@dataclass(frozen=True)
class HubFile:
    path: str
    data: bytes

    @property
    def is_large(self) -> bool:
        return len(self.data) > _LARGE or self.path.endswith(".safetensors")

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def sha1(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_large else self.sha1


@dataclass
class Hub:
    repositories: dict[str, dict[str, HubFile]]
    port: int = 0
    asked: list[str] = field(default_factory=list)  # "GET /path"
    breaks: list[tuple[int, bool]] = field(default_factory=list)  # next answers end so soon; True: by a reset
    corrupt: set[str] = field(default_factory=set)  # paths that arrive with a wrong byte
    refuses: int = 0  # the status of every answer
    gate: threading.Event | None = None  # large files stop half-way until it is set
    at_gate: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def variables(self, folder: Path) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}


def files(**changes: bytes) -> dict[str, HubFile]:
    """A repository of the official layout, whose weights nobody loads."""
    weights = bytes(range(256)) * 2000
    content = {
        "config.json": b'{"model_type": "qwen3_tts"}',
        "generation_config.json": b"{}",
        "vocab.json": b"{}",
        "merges.txt": b"#",
        "speech_tokenizer/config.json": b'{"model_type": "qwen3_tts_tokenizer_12hz"}',
        "speech_tokenizer/model.safetensors": weights[:200_000],
        WEIGHTS: weights,
        "model-00002-of-00002.safetensors": weights[7:],
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": WEIGHTS, "b": "model-00002-of-00002.safetensors"}}
        ).encode(),
    } | changes
    return {path: HubFile(path, data) for path, data in content.items()}


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    with running(type("Handler", (_Handler,), {"hub": hub}), port=hub.port) as url:
        hub.port = int(url.rpartition(":")[2])
        try:
            yield hub
        finally:
            if hub.gate is not None:
                hub.gate.set()


class _Handler(QuietHandler, BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        first = int(match[1]) if (match := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        self.hub.asked.append(f"{self.command} {path}")
        if self.hub.refuses:
            self._send(self.hub.refuses, b"")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path):
            self._describe(match[1], match[2] or "")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._resolve(match[1], match[2])
        elif match := re.fullmatch(r"/files/([^/]+/[^/]+)/(.+)", path):
            assert "Authorization" not in self.headers, "a token is for the hub itself"
            self._send_file(self.hub.repositories[match[1]][match[2]], first)
        else:
            self._send(404, b"")

    def _describe(self, name: str, rest: str) -> None:
        if name not in self.hub.repositories:
            self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
            return
        files = self.hub.repositories[name].values()
        if rest.startswith("/tree/"):
            tree = [{"type": "file", "path": f.path, "oid": f.sha1} | self._sizes(f, "oid") for f in files]
            self._send_json(tree)
            return
        siblings = [{"rfilename": f.path, "blobId": f.sha1} | self._sizes(f, "sha256") for f in files]
        self._send_json({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings})

    def _sizes(self, file: HubFile, digest: str) -> dict[str, Any]:
        size = {"size": len(file.data)}
        return size | ({"lfs": {digest: file.sha256, "pointerSize": 135, **size}} if file.is_large else {})

    def _resolve(self, name: str, path: str) -> None:
        file = self.hub.repositories.get(name, {}).get(path)
        if file is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        if file.is_large:
            headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.data))}
            # Another name of this machine is another host.
            headers["Location"] = f"http://localhost:{self.hub.port}/files/{name}/{path}"
            self._send(302, b"", headers)
        else:
            self._send(200, self._data(file), headers)

    def _data(self, file: HubFile) -> bytes:
        return file.data[:-1] + bytes([file.data[-1] ^ 1]) if file.path in self.hub.corrupt else file.data

    def _send_file(self, file: HubFile, first: int) -> None:
        rest = self._data(file)[first:]
        part = f"bytes {first}-{len(file.data) - 1}/{len(file.data)}"
        headers = {"Content-Length": str(len(rest)), "Content-Range": part}
        self.send_response(206 if first else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.hub.breaks:
            count, by_reset = self.hub.breaks.pop(0)
            self.wfile.write(rest[:count])
            self.close_connection = True
            if by_reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        if self.hub.gate is not None and len(rest) > _LARGE:
            self.wfile.write(rest[: len(rest) // 2])
            self.hub.at_gate.set()
            self.hub.gate.wait(BOUND_S)
            rest = rest[len(rest) // 2 :]
        self.wfile.write(rest)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
