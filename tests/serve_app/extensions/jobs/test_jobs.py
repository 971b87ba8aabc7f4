import asyncio
import io
import os
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import soundfile
from httpx import AsyncClient

from deployments.errors import EngineError, InvalidRequest, Overloaded, ReplicaLost, TalkerLost
from deployments.protocol import FinishReason, ModelInfo, Sampling
from serve_app.cli.key_file import create_key
from serve_app.config import AccessSettings
from serve_app.extensions.jobs import job_manager, job_store, planning, stored_audio
from serve_app.extensions.jobs import work as work_module
from serve_app.extensions.jobs.job_store import JobStore
from serve_app.extensions.jobs.segment_maker import JobStopped
from serve_app.extensions.jobs.settings import JobSettings
from serve_app.extensions.jobs.stored_job import JobState, MadeSegment, SegmentId, StoredJob
from serve_app.extensions.jobs.work import Work
from serve_app.extensions.records.request_lines import entry_of
from serve_app.extensions.voices import clocks, voice_store
from serve_app.extensions.voices.voice_store import Damaged, StoreFailed, VoiceStore
from tests.clock import Clock
from tests.serve_app.extensions.jobs.desk import Server, Speaker, asked, serving, so, started, until
from tests.serve_app.extensions.voices.speakers import files_in, store, wav
from tests.serve_app.fake import BASE, CUSTOM_VOICE, FOLLOWED
from tests.serve_app.one_model import refusal

pytestmark = pytest.mark.anyio

FRAME_S, LONGEST_ID = 0.08, "a" * 200
KEPT = ("plans", "segments")  # folders whose files count for their owner


async def test_a_job_is_spoken_and_fetched(tmp_path: Path, speaker: Speaker, client: AsyncClient) -> None:
    job = await started(client, "Hello there.", "And a [pause 1s] second part. [pause 2s]")
    assert job["object"] == "audio.job"
    assert job["parts"] == {"total": 2, "done": 0}
    told = await until(client, job, "completed")
    assert told["segments"] == {"total": 3, "done": 3}
    assert told["bytes"] == sum(file.stat().st_size for file in files_in(tmp_path) if file.parts[-3] in KEPT)
    assert told["audio_s"] == pytest.approx(FRAME_S * 29 + 3)
    assert told["problems"] == []
    assert all(request.background for request in speaker.requests)
    place = f"/v1/audio/jobs/{job['id']}"
    first = await client.get(f"{place}/parts/0", params={"response_format": "wav"})
    samples, rate = soundfile.read(io.BytesIO(first.content), dtype="int16")
    assert (rate, len(samples)) == (24000, 12 * 1920)
    whole = await client.get(f"{place}/audio")
    assert whole.headers["content-type"] == "audio/flac"
    both, _ = soundfile.read(io.BytesIO(whole.content), dtype="int16")
    assert (both[: len(samples)] == samples).all()
    assert len(both) == 29 * 1920 + 3 * rate
    words = (await client.get(f"{place}/parts/1/words")).json()
    assert [each["start"] for each in words["segments"]] == [0, pytest.approx(FRAME_S * 5 + 1)]
    assert [each["start"] for each in words["words"]] == pytest.approx([0, 0.36, 1.44, 2.0], abs=0.01)
    listed = (await client.get("/v1/audio/jobs")).json()["data"]
    assert [each["id"] for each in listed] == [job["id"]]


@pytest.mark.parametrize("info", [FOLLOWED, CUSTOM_VOICE], ids=["exact", "estimated"])
async def test_words_and_segments_of_a_part(tmp_path: Path, info: ModelInfo) -> None:
    text = "Hello there all of you. This is the second sentence of it."
    async with serving(tmp_path, Speaker(info)) as (_, client):
        job = await started(client, text, max_segment_chars=50, speed=2)
        await until(client, job, "completed")
        told = (await client.get(f"/v1/audio/jobs/{job['id']}/parts/0/words")).json()
        assert [word["word"] for word in told["words"]] == text.split()
        assert told["estimated"] is (not info.word_times)
        assert told["duration_s"] == pytest.approx(FRAME_S * len(text) / 2, rel=0.05)  # twice as fast
        assert len(told["segments"]) == 2
        assert told["segments"][0]["end"] == told["segments"][1]["start"]
        starts = [word["start"] for word in told["words"]]
        assert starts == sorted(starts)
        begins = told["segments"][1]["text"].split()[0]
        second = next(word for word in told["words"] if word["word"] == begins)
        assert second["start"] == pytest.approx(told["segments"][1]["start"], abs=0.1)


@pytest.mark.parametrize("fields", [{"deterministic": True, "seed": 3}, {}])
async def test_after_deaths_only_what_was_running_is_made_again_with_the_same_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    """A fake's codes are those of seed and text, as a talker's are; tests/faults kills real ones."""
    texts = [f"Text number {number}." for number in range(8)]
    speaker = Speaker(replace(FOLLOWED, deterministic=True))
    monkeypatch.setattr(job_manager, "_MOST_SEGMENTS", 2.0)
    async with serving(tmp_path, speaker) as (server, client):
        whole = await started(client, *texts, **fields)
        assert whole["deterministic"] is bool(fields)
        await until(client, whole, "completed")
        speaker.requests.clear()
        killed = await started(client, *texts, **fields)
        await so(lambda: len(speaker.requests) > 3)
        speaker.gate.clear()
        await so(lambda: speaker.running == 2)
        await server.die()
    speaker.gate.set()
    speaker.errors = [ReplicaLost("gone"), EngineError("broken")]
    async with serving(tmp_path, speaker) as (server, client):
        told = await until(client, killed, "completed")
        assert told["segments"] == {"total": 8, "done": 8}
        assert len(speaker.requests) <= 8 + 2 + 2  # two were running, and two errors followed
        assert len({(request.request_id, request.seed) for request in speaker.requests}) == 8
        if not fields:  # its seeds are of its own
            return
        store = server.manager._store()
        made, _ = next(store.made(str(killed["id"])))
        store.save(str(killed["id"]), replace(made, was_redrawn=True), b"made by another process, which stopped late")
        codes = [
            {made.id: store.content(str(job["id"]), made).codes.tobytes() for made, _ in store.made(str(job["id"]))}
            for job in (whole, killed)
        ]
        assert codes[0] == codes[1]
        assert len(codes[0]) == 8


async def test_a_job_is_deterministic_where_its_talkers_are_or_not_at_all(tmp_path: Path) -> None:
    speaker = Speaker(replace(FOLLOWED, deterministic=True))
    async with serving(tmp_path, speaker) as (server, client):
        server.hindrance = "not yet"
        job = await started(client, "One.", deterministic=True)
        speaker.info = FOLLOWED
        server.hindrance = None
        assert "talker.deterministic" in str((await until(client, job, "failed"))["reason"])
        for body, param in (
            ({"deterministic": True}, "deterministic"),
            ({"deterministic": "yes"}, "deterministic"),
            ({"inputs": [{"input": "One.", "deterministic": False}]}, "inputs[0].deterministic"),
        ):
            assert refusal(await asked(client, "One.", **body)) == (400, param)


async def test_a_part_may_be_a_chapter(tmp_path: Path) -> None:
    text = " ".join(f"This is sentence {number} of a chapter." for number in range(700))
    async with serving(tmp_path, Speaker(), JobSettings(max_input_chars=len(text))) as (_, client):
        job = await started(client, text, instructions=text[:4096])
        assert (await client.get(f"/v1/audio/jobs/{job['id']}")).json()["segments"]["total"] > 20
        for fields, param in (({}, "inputs[1].input"), ({"instructions": text[:5000]}, "instructions")):
            answer = await asked(client, "One.", text + "!", **fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert answer.json()["error"]["code"] == "string_above_max_length"


async def test_a_range_of_wav_is_that_of_the_whole(client: AsyncClient) -> None:
    job = await started(client, "Hello there.", "And more.")
    await until(client, job, "completed")
    place = f"/v1/audio/jobs/{job['id']}/audio?response_format=wav"
    answered = await client.get(place)
    whole = answered.content
    assert b"trainedAlgorithmicMedia" in whole[:200]
    assert answered.headers["x-digital-source-type"].endswith("trainedAlgorithmicMedia")
    size = len(whole)
    for span, start, end in (
        ("bytes=0-9", 0, 10),
        ("bytes=40-50000", 40, 50001),
        ("bytes=-100", size - 100, size),
        (f"bytes=-{size + 9}", 0, size),
        ("bytes=60000-", 60000, size),
        (f"bytes=60000-{size + 9}", 60000, size),
    ):
        answer = await client.get(place, headers={"range": span})
        assert answer.status_code == 206
        assert answer.content == whole[start:end]
        assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
    beyond = await client.get(place, headers={"range": f"bytes={size}-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{size}")
    assert (await client.get(place, headers={"range": "bytes=5-2"})).status_code == 200


async def test_a_part_has_the_sample_rate_of_its_own_model(server: Server, client: AsyncClient) -> None:
    job = await started(client, "One.")
    await until(client, job, "completed")
    work = server.manager._works[str(job["id"])]
    other = StoredJob.described(replace(FOLLOWED, sample_rate=48_000))
    work.job = work.job.model_copy(update={"models": {"other": other, **work.job.models}})
    place = f"/v1/audio/jobs/{job['id']}"
    assert (await client.get(f"{place}/parts/0")).headers["x-sample-rate"] == "24000"
    assert refusal(await client.get(f"{place}/audio"), "code") == (409, "mixed_sample_rates")


@pytest.mark.parametrize(("longest", "is_told"), [(1, 1), (0, 0)])
async def test_length_of_an_mp3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: int, is_told: int) -> None:
    async with serving(tmp_path, Speaker()) as (_, client):
        job = await started(client, "Hello there.")
        await until(client, job, "completed")
        monkeypatch.setattr(stored_audio, "_LONGEST_MP3_KEPT", longest * 2 * 12 * 1920)
        for path in ("audio", "parts/0"):
            answer = await client.get(f"/v1/audio/jobs/{job['id']}/{path}?response_format=mp3")
            assert answer.content[:1000].count(b"Info") == is_told


async def test_a_full_store_pauses_and_the_job_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app.extensions.voices import voice_store as files

    written, is_full = files.write_file, True

    def write_file(file: Path, content: bytes) -> None:
        if is_full and "segments" in file.parts:
            raise OSError(28, "No space left on device")
        written(file, content)

    monkeypatch.setattr(files, "write_file", write_file)
    speaker = Speaker()
    async with serving(tmp_path, speaker) as (_, client):
        job = await started(client, "One.", "Two.", "Three.", "Four.")
        told = await until(client, job, "paused")
        assert "No space left on device" in str(told["reason"])
        is_full = False
        told = await until(client, job, "completed")
        assert told["reason"] is None
        assert len(speaker.requests) == 4  # what was made was kept in memory


async def test_what_cannot_be_read_pauses_and_the_job_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_manager, "_LOOK_S", 0.05)
    speaker = Speaker()
    speaker.errors = [StoreFailed("the voice cannot be read")] * 2
    async with serving(tmp_path, speaker) as (_, client):
        job = await started(client, "One.")
        assert (await until(client, job, "paused"))["reason"] == "The job store is not available. The server retries."
        assert (await until(client, job, "completed"))["reason"] is None
        assert len(speaker.requests) == 3


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        *(({"fingerprint": "2"}, False), ({"name": "other"}, False), ({"fingerprint": "1", "word_times": False}, True)),
        ({}, False),  # its model is gone
    ],
)
async def test_a_job_goes_on_with_its_own_model(tmp_path: Path, change: dict[str, object], is_same: bool) -> None:
    made_for = replace(FOLLOWED, fingerprint="1")
    speaker = Speaker(made_for)
    async with serving(tmp_path, speaker) as (server, client):
        server.hindrance = "not yet"
        job = await started(client, "One.")
        speaker.info = replace(made_for, **change)  # type: ignore[arg-type]
        if not change:
            server.synthesizers.clear()
        server.hindrance = None
        reason = (await until(client, job, "completed" if is_same else "failed"))["reason"]
        assert is_same or ("Load that model, and resume" if change else "no longer served") in str(reason)


async def test_changes_of_a_job_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, write, cancels = threading.Event(), JobStore.write_state, threading.Event()

    def slowly(store: JobStore, job_id: str, state: JobState) -> None:
        if state.cancelled:
            cancels.set()
            assert may_write.wait(10)
        write(store, job_id, state)

    monkeypatch.setattr(JobStore, "write_state", slowly)
    async with serving(tmp_path, speaker := Speaker()) as (_, client):
        speaker.gate.clear()
        place = f"/v1/audio/jobs/{(await started(client, 'One.'))['id']}"
        cancel = asyncio.create_task(client.post(f"{place}/cancel"))
        await so(cancels.is_set)
        resume = asyncio.create_task(client.post(f"{place}/resume"))
        await asyncio.wait((resume,), timeout=0.1)
        may_write.set()
        assert (await cancel).json()["status"] == "cancelled"
        assert (await resume).json()["status"] in ("queued", "running")
        assert (await client.get(place)).json()["status"] in ("queued", "running")


async def test_a_deletion_that_was_killed_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next one, or by the next process; files without a name yet go, too."""
    async with serving(tmp_path, Speaker()) as (server, client):
        whole, again, left = [await started(client, "One.") for _ in range(3)]
        for job in (whole, again, left):
            await until(client, job, "completed")
        for job in (again, left):
            (tmp_path / "segments" / str(job["id"]) / ".000000.00000.0f3a.new").write_text("")
            server.manager._store().forget(str(job["id"]))
        assert (await client.delete(f"/v1/audio/jobs/{again['id']}")).status_code == 404
        assert str(again["id"]) not in " ".join(map(str, files_in(tmp_path)))
    monkeypatch.setattr(job_manager, "_ABANDONED_S", 0.0)
    async with serving(tmp_path, Speaker()) as (_, client):
        await so(lambda: str(left["id"]) not in " ".join(map(str, files_in(tmp_path))))
        assert (await client.get(f"/v1/audio/jobs/{whole['id']}/audio")).status_code == 200


async def test_a_desk_survives_a_damaged_state_and_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_manager, "_FOLLOW_S", 0.0)
    monkeypatch.setattr(job_manager, "_LOOK_S", 0.01)
    speaker = Speaker()
    speaker.gate.clear()
    async with serving(tmp_path, speaker) as (server, client):
        other = await started(client, "One.", "Two.", "Three.")
        job = await started(client, "Four.")
        await client.post(f"/v1/audio/jobs/{job['id']}/cancel")
        (tmp_path / "states" / f"{job['id']}.json").write_text("{")
        await so(lambda: speaker.running == 2)
        await server.die()
        speaker.gate.set()
        server.start()
        await until(client, other, "completed")
        assert (await client.get(f"/v1/audio/jobs/{job['id']}")).json()["status"] == "cancelled"
        with monkeypatch.context() as away:
            away.setattr(JobStore, "marks", Mock(side_effect=StoreFailed("away")))
            for known, status in ((other["id"], 200), ("job_" + "0" * 24, 503)):
                assert (await client.get(f"/v1/audio/jobs/{known}")).status_code == status
        assert (await client.delete(f"/v1/audio/jobs/{job['id']}")).status_code == 200


async def test_a_segment_is_kept_if_its_state_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_manager, "_FOLLOW_S", 60.0)
    speaker, errors, state = Speaker(), [StoreFailed("not now")], JobStore.state
    speaker.gate.clear()

    def failing(store: JobStore, job_id: str) -> JobState:
        if errors:
            raise errors.pop()
        return state(store, job_id)

    async with serving(tmp_path, speaker) as (server, client):
        job = await started(client, "One.")
        await so(lambda: speaker.running == 1)
        server.manager._store().write_state(str(job["id"]), JobState())  # another process does
        monkeypatch.setattr(JobStore, "state", failing)
        speaker.gate.set()
        await so(lambda: server.manager._works[str(job["id"])].state.ended_at is not None)
        assert (errors, len(speaker.requests)) == ([], 1)


async def test_lost_answers_leave_no_job(tmp_path: Path, client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    create = JobStore.create

    def lost(store: JobStore, job: StoredJob) -> None:
        create(store, job)
        raise StoreFailed("no answer")

    monkeypatch.setattr(JobStore, "create", lost)
    assert (await asked(client, "One.")).status_code == 503
    assert files_in(tmp_path) == []


async def test_a_deletion_comes_after_a_state_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes, written, write = threading.Event(), threading.Event(), JobStore.write_state

    def slowly(store: JobStore, job_id: str, state: JobState) -> None:
        if state.ended_at is not None:
            writes.set()
            time.sleep(0.2)
        write(store, job_id, state)
        if writes.is_set():
            written.set()

    async with serving(tmp_path, Speaker()) as (_, client):
        monkeypatch.setattr(JobStore, "write_state", slowly)
        job = await started(client, "One.")
        await so(writes.is_set)
        assert (await client.delete(f"/v1/audio/jobs/{job['id']}")).status_code == 200
    assert written.wait(10)
    assert files_in(tmp_path) == []


async def test_a_deletion_does_not_wait_for_a_slow_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_manager, "_REMOVAL_S", 0.01)
    slow, delete = threading.Event(), VoiceStore.delete

    def wait(store: VoiceStore, *paths: str) -> None:
        assert not paths or "jobs/" in paths[0] or slow.wait(10)
        delete(store, *paths)

    async with serving(tmp_path, Speaker()) as (_, client):
        job = await started(client, "Long.")
        await until(client, job, "completed")
        monkeypatch.setattr(VoiceStore, "delete", wait)
        answer = await client.delete(f"/v1/audio/jobs/{job['id']}")
        assert (answer.status_code, answer.json()["deleted"]) == (200, True)
        assert (await client.get("/v1/audio/jobs")).json()["data"] == []
        slow.set()
        await so(lambda: not files_in(tmp_path / "segments"))


async def test_a_refused_segment_is_not_begun_while_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_manager, "_RETRY_S", 60)
    speaker = Speaker()
    async with serving(tmp_path, speaker) as (_, client):
        many = await started(client, *["Warm."] * 16)  # now the manager begins more than two at once
        await until(client, many, "completed")
        speaker.gate.clear()
        speaker.errors = [Overloaded("full")]
        job = await started(client, "Refused.", "Waits.")
        other = await started(client, "Beside it.")  # the manager looks what else may begin
        await so(lambda: speaker.running == 2)
        told = (await client.get(f"/v1/audio/jobs/{job['id']}")).json()
        assert (told["status"], [request.text for request in speaker.requests].count("Refused.")) == ("running", 1)
        await client.post(f"/v1/audio/jobs/{job['id']}/cancel")
        await so(lambda: speaker.running == 1)
        speaker.gate.set()
        await until(client, other, "completed")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("a bug"), "the server failed. See the log of the server"),
        (InvalidRequest("too long"), "too long"),
        (Damaged("the path"), "the text or the voice is missing or damaged in the store"),
        (JobStopped("load that model"), "load that model"),
    ],
)
async def test_fatal_errors_end_a_job(speaker: Speaker, client: AsyncClient, error: Exception, reason: str) -> None:
    speaker.errors = [error]
    job = await started(client, "One.")
    assert (await until(client, job, "failed"))["reason"] == f"part 0, segment 0: {reason}"
    await client.post(f"/v1/audio/jobs/{job['id']}/resume")
    assert (await until(client, job, "completed"))["reason"] is None


async def test_a_job_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    async with serving(tmp_path, Speaker()) as (_, client):
        damaged, whole = [await started(client, text) for text in ("One.", "Two.")]
        await until(client, damaged, "completed")
    (tmp_path / "jobs" / f"{damaged['id']}.json").write_text("{")
    async with serving(tmp_path, Speaker()) as (_, client):
        assert [job["id"] for job in (await client.get("/v1/audio/jobs")).json()["data"]] == [whole["id"]]


def test_what_is_left_takes_as_long_as_this_process_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems are listed by segment number, including those of segments that were not redrawn."""
    clock, segments = Clock(100.0), [MadeSegment(SegmentId(0, n), 1, FinishReason.LOOP, False) for n in range(5)]
    job = StoredJob(id="job", owner="", created_at=0, fingerprint="", models={}, num_segments=(5,))
    monkeypatch.setattr(work_module, "time", clock)
    work = Work(job, JobState(), made={each.id: each for each in segments[:2]}, num_bytes=0)
    work.begin(segments[4].id, Mock())
    clock.now_s += 3
    work.add(segments[4], 1)
    work.add(segments[2], 1)
    told = work.as_json(None, most_problems=3)
    assert told["eta_s"] == 1.5
    assert told["problems"] == [each.as_json() for each in segments[:3]]


async def test_quotas(tmp_path: Path) -> None:
    """The plan of a job counts as its segments do."""
    async with serving(tmp_path, Speaker(), jobs=JobSettings(max_jobs=9, max_bytes=4096)) as (server, client):
        server.hindrance = "not yet"
        job = await started(client, *["One."] * 8)
        assert job["bytes"] == sum(file.stat().st_size for file in (tmp_path / "plans" / str(job["id"])).iterdir())
        for texts in (["Long. "] * 40, ["One."]):  # its own plan is too large, or the segments of the first
            full = await asked(client, *texts)
            assert (full.status_code, full.json()["error"]["code"]) == (409, "quota_exceeded")
            assert "max_bytes" in full.text
            server.hindrance = None
            assert "api.jobs.max_bytes" in str((await until(client, job, "paused"))["reason"])
        assert len(files_in(tmp_path / "plans")) == 1


async def test_large_lexicons_of_parts_make_short_pieces(tmp_path: Path) -> None:
    """Those of the request, its voice and all requests may together have more words than each of them."""
    server = Server(tmp_path, Speaker(BASE))
    async with server.client() as client:
        voice = await store(client, "Mara", ref_text="Some hiss.")
        lexicon = {f"word{number:04d}": "say " * 40 for number in range(1000)}
        await client.post(f"/v1/audio/voices/{voice['id']}", json={"lexicon": lexicon})
        inputs = [{"input": "Hi.", "lexicon": {f"z{part}": "a"}} for part in range(12)]
        job = await started(client, voice="Mara", inputs=inputs)
        sizes = [file.stat().st_size for file in files_in(tmp_path / "plans")]
        assert sum(sizes) == job["bytes"]
        assert max(sizes) < 1 << 20
        pages = list[int]()
        while len(pages) < 12:
            params = {"limit": "2", "after": str(pages[-1]) if pages else ""}
            page = (await client.get(f"/v1/audio/jobs/{job['id']}/parts", params=params)).json()["data"]
            assert len(page) == 2
            pages += [part["part"] for part in page]
        assert pages == [*range(12)]


async def test_fields_of_a_part_override_and_what_has_no_effect_is_told(speaker: Speaker, client: AsyncClient) -> None:
    sampling = {"do_sample": False, "subtalker_dosample": False, "top_k": 0}
    inputs = [{"input": "One.", "seed": 5, **sampling}, {"input": "Two.", "voice": "vivian", "custom_id": "b"}]
    body = {"voice": "ryan", "seed": 7, "inputs": inputs, "response_format": "mp3", "sped": 2}
    answer = await client.post("/v1/audio/jobs", json=body)
    assert "response_format (set it when you download the audio)" in answer.headers["x-ignored"]
    assert "sped (unknown field, did you mean speed?)" in answer.headers["x-ignored"]
    await until(client, answer.json(), "completed")
    spoken = {request.text: (request.voice, request.seed, request.sampling) for request in speaker.requests}
    assert spoken == {"One.": ("ryan", 5, Sampling(**sampling)), "Two.": ("vivian", 7, Sampling())}
    answer = await client.post("/v1/audio/jobs", content='{"inputs": [{"input": "So \\ud83d."}]}')
    assert "voice (not set: serena speaks)" in answer.headers["x-ignored"]
    assert "inputs (half a surrogate pair, replaced by U+FFFD)" in answer.headers["x-ignored"]


@pytest.mark.parametrize(
    ("info", "told", "spoken"),
    [
        (FOLLOWED, "direction in brackets 1", ["Low.", "Low. sad", "Low. calm", "Low."]),
        (BASE, "direction in brackets 2", ["Plain.", "Sigh.", "Plain.", "Plain."]),
    ],
)
async def test_tags_choose_the_style_of_segments(tmp_path: Path, info: ModelInfo, told: str, spoken: list[str]) -> None:
    speaker = Speaker(info)
    async with serving(tmp_path, speaker) as (_, client):
        place = f"/v1/audio/voices/{(await store(client, 'ryan', ref_text='Plain.'))['id']}"
        take = {"audio_sample": ("a.wav", wav(1), "audio/wav")}
        await client.post(place, data={"style": "sad", "ref_text": "Sigh."}, files=take)
        texts = ("One. [sad] Two. [calm] Three.", "Four. [laughs] <b>Five.</b>")
        answer = await asked(client, *texts, instructions="Low.")
        assert all(each in answer.headers["x-ignored"] for each in (told, "tag b 2"))
        job = await until(client, answer.json(), "completed")
        words = (await client.get(f"/v1/audio/jobs/{job['id']}/parts/0/words")).json()["words"]
    assert [word["word"] for word in words] == ["One.", "Two.", "Three."]
    made = {request.text: request for request in speaker.requests}
    styles = [each.instructions if each.reference is None else each.reference.text for each in made.values()]
    texts = ("One.", "Two.", "Three.", "Four. Five.")
    assert dict(zip(made, styles, strict=True)) == dict(zip(texts, spoken, strict=True))


async def test_a_stored_voice_speaks_and_a_job_whose_voice_was_deleted_fails(tmp_path: Path) -> None:
    speaker = Speaker(BASE)
    async with serving(tmp_path, speaker) as (server, client):
        voice = await store(client, "Mara", ref_text="Some hiss.")
        server.hindrance = "not yet"
        job = await started(client, "One.", voice="Mara")
        lost = await started(client, "Two.", voice=voice["id"], language="german")
        server.hindrance = None
        await until(client, job, "completed")
        await until(client, lost, "completed")
        first, second = sorted(speaker.requests, key=lambda request: request.text)  # which begins first is not said
        assert first.reference is not None
        assert first.reference.text == "Some hiss."
        assert (first.language, second.language) == ("auto", "german")
        server.hindrance = "not yet"
        lost = await started(client, "Three.", voice="Mara")
        assert (await client.delete(f"/v1/audio/voices/{voice['id']}")).status_code == 200
        server.hindrance = None
        told = await until(client, lost, "failed")
        assert told["reason"] == f"part 0, segment 0: the voice {voice['id']} was deleted. Create a new job"


@pytest.mark.parametrize("sets_it", [False, True])
@pytest.mark.parametrize("clones_by_vector", [False, True])
async def test_a_stored_voice_speaks_by_its_vector(tmp_path: Path, clones_by_vector: bool, sets_it: bool) -> None:
    """Also if an admin's job uses the voice of another key."""
    speaker, file = Speaker(replace(BASE, clones_by_vector=clones_by_vector)), tmp_path / "keys.json"
    ada, root = (f"Bearer {create_key(file, name, admin=name == 'root')}" for name in ("ada", "root"))
    access = AccessSettings(keys_file=file)
    async with serving(tmp_path / "store", speaker, access=access, authorization=root) as (server, client):
        await store(server.client(authorization=ada), "Mara", ref_text="Some hiss.")
        job = await started(client, "One.", voice="Mara", x_vector_only_mode=sets_it)
        await until(client, job, "completed")
    [reference] = [request.reference for request in speaker.requests]
    assert reference is not None
    assert reference.x_vector_only == (clones_by_vector or sets_it)


async def test_segments_lost_together_are_made_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_manager, "_TOGETHER_S", 0.2)
    speaker = Speaker()
    async with serving(tmp_path, speaker) as (server, client):
        await until(client, await started(client, *["Warm."] * 16), "completed")  # now it begins several at once
        speaker.gate.clear()
        beside = await started(client, *["Beside."] * 6)
        await so(lambda: speaker.running == 6)
        speaker.errors = [TalkerLost("gone")] * 4
        pieces = Mock(wraps=server.manager._store().plan)
        monkeypatch.setattr(JobStore, "plan", pieces)
        job = await started(client, "One.", "Two.", "Three.", "Four.", *["More."] * 4)
        work = server.manager._works[str(job["id"])]
        await so(lambda: len(work.suspects) == 4 and not work.running)
        for _ in range(99):
            await asyncio.sleep(0)
        assert speaker.running == 6, "nothing else begins before what was lost"
        speaker.gate.set()
        await so(lambda: not speaker.running)
        speaker.most_running, num_alone = 0, len(speaker.requests)
        await so(lambda: not work.suspects)
        assert speaker.most_running == 1
        assert len({request.request_id for request in speaker.requests[num_alone : num_alone + 4]}) == 4
        await until(client, job, "completed")
        await until(client, beside, "completed")
        assert not work.failures or not any(work.failures.values())
        assert pieces.call_count == 1, "which all segments use"


async def test_a_job_that_is_deleted_while_it_runs_leaves_nothing(
    tmp_path: Path, speaker: Speaker, server: Server, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what is made at that moment, nor what a thread stores then; where the deletion fails the job goes on."""
    stores, stored, save, forget = threading.Event(), threading.Event(), JobStore.save, JobStore.forget

    def slowly(store: JobStore, job_id: str, made: MadeSegment, content: bytes) -> str | None:
        stores.set()
        assert stored.wait(10)
        return save(store, job_id, made, content)

    def fail(store: JobStore, job_id: str) -> None:
        raise StoreFailed("not now")

    monkeypatch.setattr(JobStore, "save", slowly)
    job = await started(client, *["One."] * 60)
    place = f"/v1/audio/jobs/{job['id']}"
    await so(stores.is_set)
    monkeypatch.setattr(JobStore, "forget", fail)
    assert (await client.delete(place)).status_code == 503
    assert (await client.get(place)).json()["status"] in ("queued", "running")
    monkeypatch.setattr(JobStore, "forget", forget)
    assert (await client.delete(place)).status_code == 200
    num_asked = len(speaker.requests)
    stored.set()
    await until(client, await started(client, "Another."), "completed")
    await so(lambda: str(job["id"]) not in " ".join(map(str, files_in(tmp_path))))
    assert len(speaker.requests) == num_asked + 1
    assert server.manager._works.keys() != {job["id"]}


async def test_two_processes_follow_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a successor has read the store and its predecessor still answers."""
    speaker = Speaker()
    speaker.gate.clear()
    old = Server(tmp_path, speaker)
    async with serving(tmp_path, speaker) as (_, later), old.client() as client:
        await later.get("/v1/audio/jobs")  # it has read the store
        cancelled, kept, deleted = [await started(client, *["One."] * 9) for _ in range(3)]
        for job in (cancelled, kept, deleted):
            assert (await later.get(f"/v1/audio/jobs/{job['id']}")).status_code == 200
        await so(lambda: speaker.running == 2)
        assert (await client.post(f"/v1/audio/jobs/{cancelled['id']}/cancel")).status_code == 200
        assert (await client.delete(f"/v1/audio/jobs/{deleted['id']}")).status_code == 200
        assert (await later.get(f"/v1/audio/jobs/{deleted['id']}")).status_code == 404
        speaker.gate.set()
        await until(later, kept, "completed")
        assert (await later.get(f"/v1/audio/jobs/{cancelled['id']}")).json()["status"] == "cancelled"
        for status, changed in (("queued", client), ("cancelled", later)):  # each sees what the other one does
            path = f"/v1/audio/jobs/{cancelled['id']}/{'resume' if status == 'queued' else 'cancel'}"
            assert (await changed.post(path)).status_code == 200
        assert (await client.get(f"/v1/audio/jobs/{cancelled['id']}")).json()["status"] == "cancelled"
        old.manager.is_stopping = True
        body = {"voice": "ryan", "inputs": [{"input": "One."}]}
        for method, path in (("POST", ""), ("POST", f"/{kept['id']}/cancel"), ("DELETE", f"/{kept['id']}")):
            answer = await client.request(method, f"/v1/audio/jobs{path}", json=body if not path else None)
            assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true"), path
            assert "is taking over the jobs" in answer.text
        assert (await client.get(f"/v1/audio/jobs/{kept['id']}")).status_code == 200
        assert str(deleted["id"]) not in " ".join(map(str, files_in(tmp_path)))


async def test_a_large_job_blocks_no_other_or_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path, Speaker())
    async with server.client() as client:
        large = asyncio.create_task(started(client, *["Hi."] * 2000))
        await so(lambda: bool(files_in(tmp_path / "plans")))
        await started(client, "One.")
        assert not large.done()
        job = await large
        monkeypatch.setattr(planning, "_LONGEST_PLANNING_S", 0.01)
        assert refusal(await asked(client, *["Hi."] * 2000)) == (413, "inputs")
        assert {path.name for path in (tmp_path / "plans").iterdir() if any(path.iterdir())} <= {
            *(str(each["id"]) for each in (await client.get("/v1/audio/jobs")).json()["data"])
        }
        assert job["parts"] == {"total": 2000, "done": 0}


async def test_words_of_many_segments(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their audio is not decoded, lists of others do not wait for them, and a part has a bound of segments."""
    content, read = JobStore.content, threading.Event()

    def slowly(*arguments: Any, **options: bool) -> job_store.Content:
        read.set()
        time.sleep(0.01)
        return content(*arguments, **options)

    job = await started(client, "a [pause 1ms] " * 40)
    await until(client, job, "completed")
    monkeypatch.setattr(job_store, "_from_flac", lambda flac: pytest.fail("it is not heard"))
    told = (await client.get(f"/v1/audio/jobs/{job['id']}/parts/0/words")).json()
    assert (len(told["segments"]), len(told["words"])) == (40, 40)
    starts = [word["start"] for word in told["words"]]
    assert starts == sorted(starts)
    monkeypatch.setattr(JobStore, "content", slowly)
    words = [asyncio.create_task(client.get(f"/v1/audio/jobs/{job['id']}/parts/0/words")) for _ in range(2)]
    await so(read.is_set)
    await client.get("/v1/audio/jobs")
    assert not any(task.done() for task in words)
    assert all([(await task).status_code == 200 for task in words])
    monkeypatch.setattr(planning, "MOST_SEGMENTS", 39)
    assert refusal(await asked(client, "a [pause 1ms] " * 40)) == (400, "inputs[0].input")


async def test_no_place_of_the_store_is_told(tmp_path: Path, server: Server, client: AsyncClient) -> None:
    server.hindrance = "not yet"
    job = await started(client, "One.")
    for file in files_in(tmp_path / "plans"):
        file.unlink()
    server.hindrance = None
    told = await until(client, job, "failed")
    assert "missing or damaged" in str(told["reason"])
    assert str(tmp_path) not in str(told)
    whole = await started(client, "Two.")
    await until(client, whole, "completed")
    [file] = files_in(tmp_path / "segments")
    for fault, change in (("damaged", partial(file.write_bytes, file.read_bytes()[:-99])), ("missing", file.unlink)):
        change()
        answer = await client.get(f"/v1/audio/jobs/{whole['id']}/audio")
        assert (answer.json()["error"]["code"], str(tmp_path) in answer.text) == ("voice_damaged", False)
        assert answer.json()["error"]["message"].endswith(f"is {fault}")


async def test_jobs_expire_beside_others_and_not_by_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removes, may_remove, forget, day_s = threading.Event(), threading.Event(), JobStore.forget, 86400.0
    wall, monotonic = time.time, time.monotonic
    shift = {"wall": 0.0, "monotonic": 0.0}

    def slowly(store: JobStore, job_id: str) -> None:
        removes.set()
        assert may_remove.wait(10)
        forget(store, job_id)

    monkeypatch.setattr(job_manager, "_EXPIRE_S", 0.01)
    monkeypatch.setattr(JobStore, "forget", slowly)
    clock = SimpleNamespace(time=lambda: wall() + shift["wall"], monotonic=lambda: monotonic() + shift["monotonic"])
    for module in (clocks, voice_store):
        monkeypatch.setattr(module, "time", clock)
    async with serving(tmp_path, Speaker()) as (server, client):
        old = await started(client, "One.")
        await until(client, old, "completed")
        shift["wall"] = 8 * day_s
        touched = await started(client, "Two.")
        await until(client, touched, "completed")
        assert not removes.is_set()
        shift["wall"] = 0.0
        third = await started(client, "Three.")
        await until(client, third, "completed")
        soon_s = wall() + 8 * day_s
        os.utime(tmp_path / "jobs" / f"{touched['id']}.json", (soon_s, soon_s))  # by another process
        shift.update(wall=8 * day_s, monotonic=8 * day_s)  # time has gone by
        await so(removes.is_set)
        await until(client, await started(client, "Four."), "completed")
        may_remove.set()
        await so(lambda: not {str(old["id"]), str(third["id"])} & server.manager._works.keys())
        assert str(touched["id"]) in server.manager._works


async def test_the_record_of_each_segment_is_its_own(tmp_path: Path) -> None:
    create_key(file := tmp_path / "keys.json", "ada")
    access, bob = AccessSettings(keys_file=file), f"Bearer {create_key(file, 'bob')}"
    speaker = Speaker()
    speaker.gate.clear()
    async with serving(tmp_path / "store", speaker, access=access, authorization=bob) as (server, client):
        job = await started(client, "Hello there. [pause 1s] Bye.")
        await so(lambda: speaker.running == 2)
        asyncio.get_running_loop().call_later(0.02, speaker.gate.set)
        assert (await until(client, job, "completed"))["audio_s"] == pytest.approx(FRAME_S * 16 + 1)
    told = [entry_of(record) for record in server.records]
    assert sorted((each["characters"], each["audio_s"]) for each in told) == [(4, 0.32), (12, 0.96)]
    assert {(each["key"], each["dialect"], each["voice"], each["outcome"]) for each in told} == {
        ("bob", "Jobs", "ryan", "stop")
    }
    assert all(each["took_ms"] >= each["ttfa_ms"] > 0 for each in told)
