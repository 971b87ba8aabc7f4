"""OpenAI's files and batches: speech of many texts at once, carried out as a job (docs/jobs.md#batches)."""

import asyncio
import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployments.errors import InvalidRequest, NotFound
from serve_app.api.bodies.client_input import idempotency_key, read_object
from serve_app.api.bodies.forms import read_form
from serve_app.api.requests import ignored_fields
from serve_app.api.requests.speech_body import validated
from serve_app.api.responses.listing import page_of
from serve_app.api.speech_service import SpeechService
from serve_app.dialects.dialect import Dialect, Route
from serve_app.jobs.batches import BatchFile, BatchFiles, output_of
from serve_app.jobs.job_store import JobStore
from serve_app.jobs.stored_audio import begun
from serve_app.jobs.stored_job import SPEECH, SentBatch
from serve_app.jobs.work import Json
from serve_app.visitor import VISITOR

_OUTPUT = "file-output-"  # and the hex digits of the batch
_MOST_FILES = 10_000
_KEPT = "every file is kept for api.jobs.retention_s"
_ENDED = ("completed", "failed", "cancelled")
_JSONL = "application/jsonl"


async def add_file(service: SpeechService, request: Request) -> Response:
    """Keeps a file of requests, one JSON object a line, for a batch."""
    form = await read_form(request)
    if (purpose := form.required("purpose")) != "batch":
        raise InvalidRequest(f"purpose: {purpose[:40]!r} has no use here, only batch has.", "purpose")
    if len(files := form.files_of("file")) != 1:
        raise InvalidRequest("file is required: one file of multipart/form-data.", "file")
    sent = [*form.fields, *(file.field for file in form.files)]
    most = service.settings.jobs.max_jobs
    expiring = {name: _KEPT for name in sent if name.startswith("expires_after")}
    ignored = ignored_fields.with_unknown(sent, ("file", "purpose"), expiring)
    file = await asyncio.to_thread(_files(service).add, files[0].name, files[0].data, most=most)
    return JSONResponse(_described(service, file), headers=ignored_fields.as_header(ignored))


async def list_files(
    service: SpeechService, purpose: str = "", after: str = "", limit: str = "10000", order: str = "desc"
) -> Json:
    """The caller's files, and the outputs of its batches."""
    files = await asyncio.to_thread(_files(service).all)
    files += filter(None, map(_output, await service.ask_jobs("all_of")))
    files.sort(key=lambda file: (file.created_at, file.id), reverse=order != "asc")
    entries = [_described(service, file) for file in files if purpose in ("", file.purpose)]
    return page_of(entries, after, limit, most=_MOST_FILES)


async def show_file(service: SpeechService, file_id: str) -> Json:
    """One file."""
    if not file_id.startswith(_OUTPUT):
        return _described(service, await asyncio.to_thread(_files(service).find, file_id))
    output = _output(await _job_of(service, file_id.removeprefix(_OUTPUT), "get"))
    if output is None:
        raise NotFound(f"{file_id} is not there: its batch has not ended.", "file_id", "file_not_found")
    return _described(service, output)


async def remove_file(service: SpeechService, file_id: str) -> Json:
    """Deletes a file. With the output of a batch its job goes, with all audio."""
    await show_file(service, file_id)
    if file_id.startswith(_OUTPUT):
        await _job_of(service, file_id.removeprefix(_OUTPUT), "delete")
    else:
        await asyncio.to_thread(_files(service).remove, file_id)
    return {"id": file_id, "object": "file", "deleted": True}


async def file_content(service: SpeechService, file_id: str) -> Response:
    """What the file holds."""
    if not file_id.startswith(_OUTPUT):
        return Response(await asyncio.to_thread(_files(service).content, file_id), media_type=_JSONL)
    await show_file(service, file_id)
    store = JobStore(service.voices.files())
    disclosed = service.settings.disclose_synthetic
    output = output_of(store, f"job_{file_id.removeprefix(_OUTPUT)}", disclosed=disclosed)
    return StreamingResponse(await begun(output), media_type=_JSONL)


async def create_batch(service: SpeechService, request: Request) -> Response:
    """Starts a job of the lines of a file."""
    key = idempotency_key(request)
    fields = await read_object(request)
    known = {name: fields[name] for name in SentBatch.model_fields if name in fields}
    ignored_reasons = {"output_expires_after": _KEPT} if "output_expires_after" in fields else {}
    ignored = ignored_fields.with_unknown(fields, SentBatch.model_fields, ignored_reasons)
    job, unused = await service.ask_jobs("create", known, key, validated(SentBatch, known))
    return JSONResponse(_batch(job), headers=ignored_fields.as_header(ignored | unused))


async def list_batches(service: SpeechService, after: str = "", limit: str = "20") -> Json:
    """The caller's batches, the newest first."""
    return page_of([_batch(job) for job in await service.ask_jobs("all_of") if job["batch"]], after, limit)


async def show_batch(service: SpeechService, batch_id: str) -> Json:
    """A batch, with how far it is."""
    return _batch(await _job_of(service, batch_id.removeprefix("batch_"), "get"))


async def cancel_batch(service: SpeechService, batch_id: str) -> Response:
    """Makes no further speech; the output has what is made."""
    await show_batch(service, batch_id)
    return JSONResponse(_batch(await _job_of(service, batch_id.removeprefix("batch_"), "cancel")))


def _files(service: SpeechService) -> BatchFiles:
    return BatchFiles(service.voices.files(), VISITOR.get())


async def _job_of(service: SpeechService, digits: str, action: str) -> Any:
    """The job of a batch after `action`. Raises NotFound."""
    with contextlib.suppress(NotFound):
        job = await service.ask_jobs("ask", action, f"job_{digits}")
        if action == "delete" or job["batch"] is not None:
            return job
    raise NotFound(f"There is no batch {digits[:80]!r}, or it is not yours.", "batch_id", "batch_not_found")


def _batch(job: Any) -> Json:
    """OpenAI's object of a batch."""
    sent = job["batch"]
    parts = job["parts"]
    output = _output(job)
    status = job["status"] if job["status"] in _ENDED else "in_progress"
    mistakes = [job["mistake"] or {"code": "job_failed", "line": None, "message": job["reason"], "param": None}]
    return {
        "id": f"batch_{_digits(job)}",
        "object": "batch",
        **{name: sent[name] for name in ("endpoint", "input_file_id", "completion_window", "metadata")},
        "status": status,
        "errors": {"object": "list", "data": mistakes} if status == "failed" else None,
        "output_file_id": output and output.id,
        "error_file_id": None,
        "created_at": job["created_at"],
        **{f"{end}_at": job["ended_at"] if end == status else None for end in _ENDED},
        "request_counts": {"total": parts["total"], "completed": parts["done"], "failed": 0},
    }


def _output(job: Any) -> BatchFile | None:
    """The file that a batch has made; None before its end, and of what has made nothing."""
    if job["batch"] is None or job["status"] not in _ENDED or not job["parts"]["done"]:
        return None
    digits, created_at = _digits(job), job["ended_at"] or job["created_at"]
    file_id, name = _OUTPUT + digits, f"batch_{digits}.jsonl"
    return BatchFile(file_id, name, num_bytes=job["bytes"], created_at=created_at, purpose="batch_output")


def _described(service: SpeechService, file: BatchFile) -> Json:
    return file.described(service.settings.jobs.retention_s)


def _digits(job: Any) -> str:
    return str(job["id"]).removeprefix("job_")


_FILE = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "enum": ["batch"]}},
}
_FILE_DOCS = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FILE}}}}
_BATCH_DOCS = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": SentBatch.model_json_schema()}}}
}
DIALECT = Dialect(
    "OpenAI's batches",
    routes=(
        Route("POST /v1/files", add_file, "Upload a file of requests", docs=_FILE_DOCS),
        Route("GET /v1/files", list_files, "List files"),
        Route("GET /v1/files/{file_id}", show_file, "Show a file"),
        Route("DELETE /v1/files/{file_id}", remove_file, "Delete a file"),
        Route("GET /v1/files/{file_id}/content", file_content, "What a file holds"),
        Route("POST /v1/batches", create_batch, f"Start a batch of {SPEECH}", docs=_BATCH_DOCS),
        Route("GET /v1/batches", list_batches, "List batches"),
        Route("GET /v1/batches/{batch_id}", show_batch, "Show a batch"),
        Route("POST /v1/batches/{batch_id}/cancel", cancel_batch, "Cancel a batch"),
    ),
)
