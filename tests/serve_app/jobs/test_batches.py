"""OpenAI's own client, unmodified, against files and batches."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Batch, FileObject

from deployments.errors import EngineError
from deployments.protocol import PcmChunk, SynthesisRequest
from serve_app.api.access.keys import create_key
from serve_app.client_audio.file_headers import wav_header
from serve_app.config import AccessSettings, JobSettings
from tests.serve_app.client_audio.test_formats import decode
from tests.serve_app.fake import CUSTOM_VOICE
from tests.serve_app.jobs.desk import Server, Speaker, files_in, so

pytestmark = pytest.mark.anyio

SPEECH = "/v1/audio/speech"


def line(custom_id: object, text: str, **body: object) -> str:
    asked = {"model": "tts-1", "voice": "ryan", "input": text, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": SPEECH, "body": asked})


def sdk(server: Server, key: str = "any") -> AsyncOpenAI:
    transport = httpx2.ASGITransport(server.api)
    http_client = httpx2.AsyncClient(transport=transport)
    return AsyncOpenAI(api_key=key, base_url="http://talkray/v1", max_retries=0, http_client=http_client)


@asynccontextmanager
async def serving(folder: Path, speaker: Speaker, **settings: Any) -> AsyncIterator[tuple[Server, AsyncOpenAI]]:
    server = Server(folder, speaker, JobSettings(**settings))
    server.start()
    try:
        async with sdk(server) as client:
            yield server, client
    finally:
        await server.die()


async def uploaded(client: AsyncOpenAI, *lines: str) -> FileObject:
    return await client.files.create(file=("texts.jsonl", "\n".join(lines).encode()), purpose="batch")


async def begun(client: AsyncOpenAI, *lines: str, **fields: Any) -> Batch:
    file = await uploaded(client, *lines)
    endpoint: Any = SPEECH  # the client's types know no batch of speech
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


async def until(client: AsyncOpenAI, batch: Batch, status: str) -> Batch:
    async with asyncio.timeout(10):
        while (told := await client.batches.retrieve(batch.id)).status != status:  # noqa: ASYNC110, the desk tells nobody
            await asyncio.sleep(0.01)  # another task changes it
    return told


async def test_a_batch_from_its_file_to_its_output(tmp_path: Path) -> None:
    speaker = Speaker()
    async with serving(tmp_path / "store", speaker) as (_, client):
        file = await uploaded(client, line("a", "Hello there.", seed=5), "", line("b", "More.", response_format="wav"))
        assert (file.filename, file.purpose, file.status) == ("texts.jsonl", "batch", "processed")
        assert (await client.files.content(file.id)).content.count(b"\n") == 2
        endpoint: Any = SPEECH
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"book": "one"}
        )
        assert (batch.status, batch.output_file_id, batch.errors) == ("in_progress", None, None)
        done = await until(client, batch, "completed")
        assert (done.input_file_id, done.metadata, done.endpoint) == (file.id, {"book": "one"}, SPEECH)
        assert done.request_counts is not None
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (2, 2, 0)
        assert done.completed_at is not None
        assert done.output_file_id is not None
        output = await client.files.retrieve(done.output_file_id)
        assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}.jsonl")
        (await client.files.content(done.output_file_id)).write_to_file(tmp_path / "out.jsonl")
        first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
        assert (first["custom_id"], second["custom_id"]) == ("a", "b")
        assert first["error"] is None
        assert first["response"]["status_code"] == 200
        assert first["response"]["body"]["content_type"] == "audio/mpeg"
        wav = base64.b64decode(second["response"]["body"]["audio"], validate=True)
        header = wav_header(CUSTOM_VOICE.sample_rate, 0, disclosed=True)
        assert len(wav) == len(header) + 2 * CUSTOM_VOICE.frame_samples * len("More.")
        samples, rate = decode(base64.b64decode(first["response"]["body"]["audio"], validate=True))
        assert samples.size / rate == pytest.approx(0.08 * len("Hello there."), abs=0.1)
        assert {request.text: request.seed for request in speaker.requests}["Hello there."] == 5


async def test_lists_are_pages_and_what_is_deleted_is_gone(tmp_path: Path) -> None:
    async with serving(tmp_path, Speaker()) as (_, client):
        batches = [await begun(client, line("a", f"Text {number}.")) for number in range(3)]
        for batch in batches:
            await until(client, batch, "completed")
        assert {batch.id async for batch in client.batches.list(limit=1)} == {batch.id for batch in batches}
        files = [file async for file in client.files.list(limit=2)]
        assert [file.purpose for file in files].count("batch_output") == 3
        assert len(files) == 6
        assert {file.purpose async for file in client.files.list(purpose="batch")} == {"batch"}
        for file in files:
            assert (await client.files.delete(file.id)).deleted
            with pytest.raises(openai.NotFoundError):
                await client.files.retrieve(file.id)
        assert [batch async for batch in client.batches.list()] == []
        assert files_in(tmp_path) == []


class Halting(Speaker):
    """Begins the second text, and does not end it."""

    async def synthesize(self, request: SynthesisRequest, info: object = None) -> AsyncGenerator[PcmChunk, None]:
        if request.text == "Two.":
            self.gate.clear()
        async with aclosing(super().synthesize(request)) as chunks:
            async for chunk in chunks:
                yield chunk


async def test_a_cancelled_batch_has_what_was_made(tmp_path: Path) -> None:
    speaker = Halting()
    async with serving(tmp_path, speaker, max_segments=1) as (server, client):
        batch = await begun(client, line("a", "One."), line("b", "Two."))
        await so(lambda: speaker.running == 1 and len(speaker.requests) == 2)
        cancelled = await client.batches.cancel(batch.id)
        assert cancelled.status == "cancelled"
        assert cancelled.cancelled_at is not None
        assert cancelled.output_file_id is not None
        content = (await client.files.content(cancelled.output_file_id)).content
        first, second = map(json.loads, content.splitlines())
        assert first["response"]["body"]["audio"]
        assert (second["custom_id"], second["response"], second["error"]["code"]) == ("b", None, "not_finished")
        assert server.desk._works.keys() == {batch.id.replace("batch_", "job_")}  # a job as any other


MISTAKES: list[tuple[list[str], int, str | None, str]] = [
    ([line("a", "One."), "", line("b", "Two.", voice="nobody")], 3, "voice", "voice_not_found"),
    ([line("a", "One."), line("a", "Two.")], 2, "custom_id", "duplicate_custom_id"),
    ([line(7, "One.")], 1, "custom_id", "invalid_value"),
    ([line("a", "One."), '{"custom_id": "b"'], 2, None, "invalid_json"),
    ([line("a", "One.").replace("audio/speech", "responses")], 1, "url", "invalid_value"),
    ([line("a", "One.").replace("POST", "GET")], 1, "method", "invalid_value"),
    (['{"custom_id": "a", "method": "POST", "url": "/v1/audio/speech"}'], 1, "body", "invalid_value"),
    ([line("a", "One.", speed=9)], 1, "speed", "invalid_value"),
    (["", ""], 1, None, "empty_file"),
]


async def test_a_mistake_in_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    speaker = Speaker()
    async with serving(tmp_path, speaker) as (_, client):
        for lines, number, param, code in MISTAKES:
            batch = await begun(client, *lines)
            assert (batch.status, batch.output_file_id) == ("failed", None)
            assert batch.failed_at is not None
            assert batch.errors is not None
            assert batch.errors.data is not None
            [error] = batch.errors.data
            assert (error.line, error.param, error.code) == (number, param, code)
            assert str(error.message).startswith(f"line {number}: ")
        again = Server(tmp_path, speaker)  # as a server that starts later tells it
        async with sdk(again) as later, again.client() as http:
            assert await later.batches.retrieve(batch.id) == batch
            resumed = await http.post(f"/v1/audio/jobs/job_{batch.id.removeprefix('batch_')}/resume")
            assert resumed.json()["status"] == "failed"
    assert speaker.requests == []


async def test_a_batch_that_fails_says_why(tmp_path: Path) -> None:
    speaker = Speaker()
    async with serving(tmp_path, speaker) as (_, client):
        speaker.errors = [EngineError("broken")] * 3
        failed = await until(client, await begun(client, line("a", "One.")), "failed")
        assert failed.errors is not None
        assert failed.errors.data is not None
        assert failed.errors.data[0].message == "part 0, segment 0: broken"


async def test_what_a_batch_cannot_be_is_a_400_with_its_field(tmp_path: Path) -> None:
    async with serving(tmp_path, Speaker(), max_jobs=1) as (server, client), server.client() as http:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.files.create(file=("a.jsonl", b"{}"), purpose="fine-tune")
        assert refused.value.param == "purpose"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.files.create(file=("a" * 101, b"{}"), purpose="batch")
        assert refused.value.param == "file"
        file = await uploaded(client, line("a", "One."))
        with pytest.raises(openai.ConflictError) as full:
            await uploaded(client, line("a", "One."))
        assert full.value.code == "quota_exceeded"
        good = {"input_file_id": file.id, "endpoint": SPEECH, "completion_window": "24h"}
        for field, value in (
            ("endpoint", "/v1/responses"),
            ("completion_window", "1h"),
            ("input_file_id", None),
            ("metadata", {"a": 1}),
            ("metadata", {"a": "b" * 513}),
        ):
            answer = await http.post("/v1/batches", json={**good, field: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        with pytest.raises(openai.NotFoundError):
            await client.batches.create(input_file_id="file-0", endpoint="/v1/audio/speech", completion_window="24h")  # type: ignore[arg-type]
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve("batch_0")


async def test_what_has_no_effect_is_told(tmp_path: Path) -> None:
    async with serving(tmp_path, Speaker()) as (server, client), server.client() as http:
        file = await uploaded(client, line("a", "One.", stream_format="sse", sped=2))
        batch = {"input_file_id": file.id, "endpoint": SPEECH, "completion_window": "24h"}
        expiring = {"output_expires_after": {"anchor": "created_at", "seconds": 3600}}
        answer = await http.post("/v1/batches", json={**batch, **expiring})
        told = answer.headers["x-ignored"]
        assert "output_expires_after (every file is kept for api.jobs.retention_s)" in told
        assert "stream_format (without effect in a batch)" in told
        assert "sped (unknown field, did you mean speed?)" in told


async def test_the_same_key_is_the_same_batch(tmp_path: Path) -> None:
    async with serving(tmp_path, Speaker()) as (_, client):
        file = await uploaded(client, line("a", "One."))
        batch: Any = {"input_file_id": file.id, "endpoint": SPEECH, "completion_window": "24h"}
        once, again = [await client.batches.create(**batch, extra_headers={"Idempotency-Key": "one"}) for _ in range(2)]
        assert once.id == again.id
        with pytest.raises(openai.ConflictError):
            await client.batches.create(**batch, metadata={"other": "body"}, extra_headers={"Idempotency-Key": "one"})


async def test_files_end_when_jobs_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app.jobs import desk

    monkeypatch.setattr(desk, "_SWEEP_S", 0.0)
    monkeypatch.setattr(desk, "_LOOK_S", 0.01)
    async with serving(tmp_path, Speaker(), retention_s=0.3) as (_, client):
        file = await uploaded(client, line("a", "One."))
        await so(lambda: not files_in(tmp_path))
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)


async def test_another_key_sees_no_file_and_no_batch(tmp_path: Path) -> None:
    keys = {name: create_key(tmp_path / "keys.json", name) for name in ("ada", "bob")}
    server = Server(tmp_path / "store", Speaker(), access=AccessSettings(keys_file=tmp_path / "keys.json"))
    server.start()
    try:
        async with sdk(server, keys["ada"]) as own, sdk(server, keys["bob"]) as other:
            batch = await until(own, await begun(own, line("a", "One.")), "completed")
            assert [each async for each in other.files.list()] == []
            assert [each async for each in other.batches.list()] == []
            assert batch.output_file_id is not None
            for file_id in (batch.input_file_id, batch.output_file_id):
                for ask in (other.files.retrieve, other.files.delete, other.files.content):
                    with pytest.raises(openai.NotFoundError):
                        await ask(file_id)
            for ask_batch in (other.batches.retrieve, other.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    await ask_batch(batch.id)
            with pytest.raises(openai.NotFoundError):
                await begun_of(other, batch.input_file_id)
            assert (await own.files.retrieve(batch.output_file_id)).id == batch.output_file_id
    finally:
        await server.die()


async def begun_of(client: AsyncOpenAI, file_id: str) -> Batch:
    endpoint: Any = SPEECH
    return await client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h")


async def test_a_job_is_no_batch(tmp_path: Path) -> None:
    server = Server(tmp_path, Speaker())
    async with sdk(server) as client, server.client() as http:
        http_answer: httpx.Response = await http.post(
            "/v1/audio/jobs", json={"voice": "ryan", "inputs": [{"input": "One."}]}
        )
        digits = http_answer.json()["id"].removeprefix("job_")
        for ask in (client.batches.retrieve, client.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await ask(f"batch_{digits}")
        with pytest.raises(openai.NotFoundError):
            await client.files.delete(f"file-output-{digits}")
        assert (await http.get(f"/v1/audio/jobs/job_{digits}")).json()["status"] == "queued"
