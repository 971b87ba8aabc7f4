"""OpenAI's batches: files of requests that clients upload, and the file of answers that a job makes of one.

An uploaded file is one object of the store, `files/OWNER/ID.NAME`, whose owner and name are written in hex.
"""

import asyncio
import base64
import json
import re
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from deployments.errors import Conflict, InvalidRequest, NotFound
from serve_app.api.bodies.client_input import parse_object
from serve_app.api.requests.speech_request import CONTENT_TYPES
from serve_app.api.responses.whole_audio import AUDIO_HERE
from serve_app.client_audio.formats import AudioFormat
from serve_app.jobs.job_store import JobStore
from serve_app.jobs.planning import BadLine
from serve_app.jobs.stored_audio import StoredAudio, made_of
from serve_app.jobs.stored_job import SPEECH
from serve_app.jobs.work import Json, Track
from serve_app.visitor import Visitor
from serve_app.voices.voice_store import VoiceStore

_PATH = re.compile(r"files/(?:-|[0-9a-f]+)/(file-[0-9a-f]{24})\.((?:[0-9a-f]{2})+)")
_LONGEST_NAME = 100  # bytes: the hex of it is the name of a file


@dataclass(frozen=True, slots=True)
class BatchFile:
    """A file of requests, as the listing of the store tells it, or a file of answers."""

    id: str
    name: str
    num_bytes: int
    created_at: int  # seconds since 1970
    purpose: str = "batch"
    path: str = ""

    def described(self, retention_s: float) -> Json:
        """OpenAI's object of a file."""
        fields = {"id": self.id, "object": "file", "bytes": self.num_bytes, "filename": self.name}
        times = {"created_at": self.created_at, "expires_at": self.created_at + int(retention_s)}
        return {**fields, "purpose": self.purpose, "status": "processed", **times}


class BatchFiles:
    """The files of requests that a visitor may see. All methods block, and raise StoreFailed."""

    def __init__(self, store: VoiceStore, visitor: Visitor) -> None:
        self._store, self._sees_all = store, visitor.sees_all
        self._folder = f"files/{(visitor.name or '').encode().hex() or '-'}/"

    def all(self) -> list[BatchFile]:
        files = []
        for meta in self._store.listed("files/" if self._sees_all else self._folder):
            if named := _PATH.fullmatch(meta["path"]):
                name = bytes.fromhex(named[2]).decode("utf-8", "replace")
                created_at = int(meta["last_modified"].timestamp())
                files.append(
                    BatchFile(named[1], name, num_bytes=meta["size"], created_at=created_at, path=meta["path"])
                )
        return files

    def add(self, name: str, content: bytes, *, most: int) -> BatchFile:
        """Raises InvalidRequest, and Conflict where the visitor has `most` files."""
        if not 0 < len(name.encode()) <= _LONGEST_NAME:
            raise InvalidRequest(f"file: its name has 1 to {_LONGEST_NAME} bytes.", "file")
        if sum(1 for _ in self._store.listed(self._folder)) >= most:
            message = f"{most} files are kept, api.jobs.max_jobs allows no more: delete some."
            raise Conflict(message, None, "quota_exceeded")
        file_id = f"file-{secrets.token_hex(12)}"
        self._store.put(f"{self._folder}{file_id}.{name.encode().hex()}", content)
        return self.find(file_id)

    def find(self, file_id: str) -> BatchFile:
        """Raises NotFound."""
        match = next((file for file in self.all() if file.id == file_id), None)
        if match is None:
            raise NotFound(f"There is no file {file_id[:80]!r}, or it is not yours.", "file_id", "file_not_found")
        return match

    def content(self, file_id: str) -> bytes:
        """Raises NotFound."""
        content = self._store.get(self.find(file_id).path)
        if content is None:
            raise NotFound(f"The file {file_id} was deleted meanwhile.", "file_id", "file_not_found")
        return content

    def remove(self, file_id: str) -> None:
        """Raises NotFound. A batch that was made of it goes on: it has its own texts."""
        self._store.delete(self.find(file_id).path)


def read_lines(content: bytes) -> tuple[list[Json], list[int]]:
    """The entries of `inputs` that the lines of a file ask for, and the number of each line from 1. Raises BadLine."""
    entries: list[Json] = []
    numbers: dict[object, int] = {}  # of lines, by custom_id
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            fields = parse_object(line)
            body = _body_of(fields)
            if (first := numbers.setdefault(fields["custom_id"], number)) != number:
                raise InvalidRequest(f"custom_id: line {first} has the same one.", "custom_id", "duplicate_custom_id")
        except InvalidRequest as error:
            raise BadLine(number, error) from None
        entries.append({**body, "custom_id": fields["custom_id"]})
    if not entries:
        raise BadLine(1, InvalidRequest("The file has no line with a request.", None, "empty_file"))
    return entries, list(numbers.values())


def _body_of(fields: Json) -> Json:
    custom_id, body = fields.get("custom_id"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidRequest("custom_id must be a string, which no other line has.", "custom_id")
    if (method := fields.get("method")) != "POST":
        raise InvalidRequest(f"method: {str(method)[:40]!r} is not POST.", "method")
    if (url := fields.get("url")) != SPEECH:
        raise InvalidRequest(f"url: {str(url)[:80]!r} is not {SPEECH}.", "url")
    if not isinstance(body, dict):
        raise InvalidRequest(f"body must be an object, as {SPEECH} takes it.", "body")
    return body


async def output_of(store: JobStore, job_id: str, *, disclosed: bool) -> AsyncGenerator[bytes, None]:
    """A line of JSON for each part, with its audio in base64, or with an error. It is made as it is read, so that
    memory does not grow with the job. `disclosed` as in `open_encoder`. Raises Damaged and StoreFailed.
    """
    job, plan, made_by_part = await asyncio.to_thread(made_of, store, job_id)
    infos = {model: job.info(model) for model in job.models}
    for number, part in enumerate(plan.parts):
        done, info = made_by_part.get(number, []), infos[plan.manners[part.manner].model]
        line: Json = {"id": f"{job_id}.{number}", "custom_id": part.custom_id}
        if len(done) < len(part.segments):
            message = f"{len(done)} of {len(part.segments)} segments were made when the batch ended"
            yield _line({**line, "response": None, "error": {"code": "not_finished", "message": message}})
            continue
        audio_format = part.response_format or AudioFormat.MP3
        track = Track(job_id, info.sample_rate, frame_samples=info.frame_samples, made=tuple(done))
        audio = StoredAudio(store, track, audio_format, disclosed=disclosed)
        body = {"object": "audio.speech", "content_type": CONTENT_TYPES[audio_format], "audio": AUDIO_HERE}
        answered = {"status_code": 200, "request_id": f"{job_id}.{number}", "body": body}
        before, _, after = _line({"error": None, **line, "response": answered}).rpartition(AUDIO_HERE.encode())
        yield before
        rest = b""
        async for piece in audio.encoded():
            rest += piece
            end = len(rest) // 3 * 3  # the base64 of such parts joins without padding
            yield base64.b64encode(rest[:end])
            rest = rest[end:]
        yield base64.b64encode(rest) + after


def _line(fields: Json) -> bytes:
    return json.dumps(fields).encode() + b"\n"
