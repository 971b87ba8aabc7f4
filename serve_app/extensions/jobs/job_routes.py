"""Routes below `/v1/audio/jobs` for long texts (docs/jobs.md)."""

import re
from collections.abc import Awaitable, Callable
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployments.errors import InvalidRequest
from serve_app.api.access.callers import VISITOR
from serve_app.api.headers import SAMPLE_RATE_HEADER
from serve_app.api.parsing.client_input import check_form, format_named, read_body
from serve_app.api.resolve import ignored_fields
from serve_app.api.resolve.speech_request import CONTENT_TYPES, RAW, disclosure
from serve_app.api.responses.listing import json_in_thread, run_in_thread
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat, AudioOptions
from serve_app.extension import Charge, Dialect, Route
from serve_app.extensions.jobs.job_store import JobStore
from serve_app.extensions.jobs.stored_audio import StoredAudio, words_of
from serve_app.extensions.jobs.work import Json, Track
from serve_app.extensions.voices.library import voices_of
from serve_app.extensions.voices.listing import prefetch_first
from serve_app.extensions.voices.voice_store import NoStore

# Calls a method of the job manager by name. Raises NotReady if the job replica is not running.
JobsClient = Callable[..., Awaitable[Any]]

_LONGEST_KEY = 255  # characters of an Idempotency-Key
_RANGE = re.compile(r"bytes=(\d{1,15})?-(\d{1,15})?")
_FORMATS = {each.value: each for each in AudioFormat}


async def _ask(service: SpeechService, method: str, *arguments: object) -> Any:
    """Call a method of the job manager on behalf of the caller. Raises NoStore, and all errors of the method."""
    ask = cast("JobsClient | None", service.opened_by("jobs"))
    if ask is None:
        raise NoStore("This server does not run jobs.")
    return await ask(method, VISITOR.get(), *arguments)


def _idempotency_key(request: Request) -> str | None:
    """Return the request's Idempotency-Key, or None. Raises InvalidRequest if the key is empty or too long."""
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _LONGEST_KEY:
        raise InvalidRequest(f"Idempotency-Key must have 1 to {_LONGEST_KEY} characters.", "Idempotency-Key")
    return key


async def create(service: SpeechService, request: Request) -> Response:
    """Create a job from a list of texts. The server synthesizes them in the background, behind live speech."""
    key = _idempotency_key(request)
    try:
        job, ignored = await _ask(service, "create", await read_body(request), key)
    except InvalidRequest as error:
        check_form(request, error)
        raise
    return JSONResponse(job, 201, headers=ignored_fields.as_header(ignored))


async def list_all(service: SpeechService, after: str = "", limit: str = "1000") -> Response:
    """Return a page of the caller's jobs, newest first."""
    return await json_in_thread(dict, await _ask(service, "all_of", after, limit))


async def show(service: SpeechService, job_id: str) -> Response:
    """Return a job with its progress."""
    return await json_in_thread(dict, await _ask(service, "ask", "get", job_id))


async def cancel(service: SpeechService, job_id: str) -> Response:
    """Stop a job. Its finished segments are kept."""
    return JSONResponse(await _ask(service, "ask", "cancel", job_id))


async def resume(service: SpeechService, job_id: str) -> Response:
    """Resume a cancelled or failed job."""
    return JSONResponse(await _ask(service, "ask", "resume", job_id))


async def remove(service: SpeechService, job_id: str) -> Json:
    """Delete a job and its audio."""
    return dict(await _ask(service, "ask", "delete", job_id))


async def list_parts(service: SpeechService, job_id: str, after: str = "", limit: str = "1000") -> Response:
    """Return a page with progress, `custom_id` and seed of each part of a job. `after` is the number of a part."""
    return await json_in_thread(dict, await _ask(service, "parts", job_id, after, limit))


async def part_audio(
    service: SpeechService, request: Request, job_id: str, part: str, response_format: str = "flac"
) -> Response:
    """Return the audio of a finished part, even if the job is still running."""
    wanted = format_named("response_format", response_format, _FORMATS)
    return await _audio(service, request, await _ask(service, "track", job_id, part), wanted)


async def part_words(service: SpeechService, job_id: str, part: str) -> Response:
    """Return the start and end of each word and each segment of a finished part."""
    track = await _ask(service, "track", job_id, part)
    return await json_in_thread(dict, await words_of(JobStore(voices_of(service).files()), track, int(part)))


async def whole_audio(service: SpeechService, request: Request, job_id: str, response_format: str = "flac") -> Response:
    """Return the audio of all parts of a finished job, in order. `wav` and `pcm` support Range requests."""
    wanted = format_named("response_format", response_format, _FORMATS)
    return await _audio(service, request, await _ask(service, "track", job_id, None), wanted)


async def _audio(service: SpeechService, request: Request, track: Track, audio_format: AudioFormat) -> Response:
    disclosed = service.settings.disclose_synthetic
    store = JobStore(voices_of(service).files())
    audio = await run_in_thread(StoredAudio, store, track, AudioOptions(audio_format, disclosed=disclosed))
    kind = CONTENT_TYPES[audio_format]
    content_type = f"{kind};rate={track.sample_rate};channels=1" if audio_format in RAW else kind
    headers = {"content-type": content_type, SAMPLE_RATE_HEADER: str(track.sample_rate), **disclosure(disclosed)}
    size = audio.num_bytes
    headers |= {"accept-ranges": "none"} if size is None else {"accept-ranges": "bytes", "content-length": str(size)}
    if size is None or (span := _span(request.headers.get("range"), size)) is None:
        body = audio.encoded() if size is None else audio.read(0, size)
        return StreamingResponse(await prefetch_first(body), 200, headers)
    start, end = span
    if start >= end:
        return Response(status_code=416, headers={**headers, "content-length": "0", "content-range": f"bytes */{size}"})
    partial = {"content-range": f"bytes {start}-{end - 1}/{size}", "content-length": str(end - start)}
    return StreamingResponse(await prefetch_first(audio.read(start, end)), 206, {**headers, **partial})


def _span(range_header: str | None, size: int) -> tuple[int, int] | None:
    """Return the start and end (exclusive) of the requested bytes, or None if the response should contain all bytes.

    An unsupported header, such as a header with several ranges, also yields None. An unsatisfiable one yields an empty
    range.
    """
    match = _RANGE.fullmatch(range_header.strip()) if range_header else None
    if match is None or match[1] is match[2] is None:
        return None
    if match[1] is None:
        return max(0, size - int(match[2])), size
    if match[2] is not None and int(match[2]) < int(match[1]):
        return None
    return int(match[1]), min(size, int(match[2]) + 1) if match[2] is not None else size


_INPUT = {"type": "object", "required": ["input"], "properties": {"input": {"type": "string"}}}
_SCHEMA = {
    "type": "object",
    "required": ["inputs"],
    "properties": {"inputs": {"type": "array", "minItems": 1, "items": _INPUT}, "voice": {"type": "string"}},
}
_DOCS = {"requestBody": {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}}
_STREAM = Charge.STREAM
_JOBS, _JOB = "/v1/audio/jobs", "/v1/audio/jobs/{job_id}"
DIALECT = Dialect(
    "Jobs",
    routes=(
        Route(f"POST {_JOBS}", create, "Start a job", docs=_DOCS),
        Route(f"GET {_JOBS}", list_all, "List jobs"),
        Route(f"GET {_JOB}", show, "Show a job"),
        Route(f"POST {_JOB}/cancel", cancel, "Cancel a job"),
        Route(f"POST {_JOB}/resume", resume, "Resume a job"),
        Route(f"DELETE {_JOB}", remove, "Delete a job"),
        Route(f"GET {_JOB}/parts", list_parts, "List the parts of a job", charge=_STREAM),
        Route(f"GET {_JOB}/parts/{{part}}", part_audio, "Get the audio of a finished part", charge=_STREAM),
        Route(f"GET {_JOB}/parts/{{part}}/words", part_words, "Get the words of a finished part", charge=_STREAM),
        Route(f"GET {_JOB}/audio", whole_audio, "Get the audio of a finished job", charge=_STREAM),
    ),
)
