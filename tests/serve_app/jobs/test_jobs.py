import hashlib
import io
import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile

from deployments.errors import EngineError, Overloaded, ReplicaLost
from deployments.protocol import FinishReason, ModelInfo
from serve_app.api.access.keys import create_key
from serve_app.config import AccessSettings, JobSettings
from serve_app.jobs import desk
from serve_app.jobs.job_store import JobStore
from serve_app.jobs.stored_job import JobState
from serve_app.voices.voice_store import VoiceStore
from tests.serve_app.fake import BASE, CUSTOM_VOICE, FOLLOWED
from tests.serve_app.jobs.desk import Server, Speaker, files_in, serving, so, started, until
from tests.serve_app.voices.speakers import store

pytestmark = pytest.mark.anyio

FRAME_S = 0.08


async def test_a_job_is_spoken_part_by_part_and_fetched(tmp_path: Path) -> None:
    speaker = Speaker()
    async with serving(tmp_path, speaker) as (_, client):
        job = await started(client, "Hello there.", "And a second part.")
        assert job["object"] == "audio.job"
        assert job["parts"] == {"total": 2, "done": 0}
        told = await until(client, job, "completed")
        assert told["segments"] == {"total": 2, "done": 2}
        assert told["audio_s"] == pytest.approx(FRAME_S * (12 + 18))
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
        assert len(both) == 30 * 1920
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


async def test_parts_are_told_with_what_their_client_calls_them(tmp_path: Path) -> None:
    speaker = Speaker()
    speaker.gate.clear()
    async with serving(tmp_path, speaker) as (_, client):
        inputs = [{"input": "One.", "custom_id": "a", "seed": 5}, {"input": "Two and more."}]
        answer = await client.post("/v1/audio/jobs", json={"voice": "ryan", "inputs": inputs})
        place = f"/v1/audio/jobs/{answer.json()['id']}"
        before = (await client.get(f"{place}/parts")).json()["data"]
        assert [part["segments"] for part in before] == [{"total": 1, "done": 0}] * 2
        speaker.gate.set()
        await until(client, answer.json(), "completed")
        first, second = (await client.get(f"{place}/parts")).json()["data"]
        done = {"total": 1, "done": 1}
        assert first == {"part": 0, "custom_id": "a", "seed": 5, "segments": done, "audio_s": FRAME_S * 4}
        assert (second["part"], second["custom_id"], second["audio_s"]) == (1, None, pytest.approx(FRAME_S * 13))
        assert (await client.get(f"{place}/parts/0/words")).json()["custom_id"] == "a"
        assert (await client.get("/v1/audio/jobs/job_0/parts")).status_code == 404


async def test_a_deterministic_job_has_the_same_codes_whatever_dies(tmp_path: Path) -> None:
    """A fake's codes are those of seed and text, as a talker's are; tests/faults kills real ones."""
    texts = [f"Text number {number}." for number in range(8)]
    speaker = Speaker(replace(FOLLOWED, deterministic=True))
    server = Server(tmp_path, speaker, JobSettings(max_segments=2))
    server.start()
    async with server.client() as client:
        whole = await started(client, *texts, deterministic=True, seed=3)
        assert whole["deterministic"] is True
        await until(client, whole, "completed")
        killed = await started(client, *texts, deterministic=True, seed=3)
        await so(lambda: len(speaker.requests) > 11)
        speaker.gate.clear()
        await so(lambda: speaker.running == 2)
        await server.die()
    speaker.gate.set()
    speaker.errors = [ReplicaLost("gone"), EngineError("broken")]
    async with serving(tmp_path, speaker) as (server, client):
        await until(client, killed, "completed")
        store = server.desk._store()
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
            answer = await client.post("/v1/audio/jobs", json={"voice": "ryan", "inputs": [{"input": "One."}], **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_part_may_be_a_chapter(tmp_path: Path) -> None:
    text = " ".join(f"This is sentence {number} of a chapter." for number in range(700))
    async with serving(tmp_path, Speaker(), JobSettings(max_input_chars=len(text))) as (_, client):
        job = await started(client, text)
        assert (await client.get(f"/v1/audio/jobs/{job['id']}")).json()["segments"]["total"] > 20
        inputs = [{"input": "One."}, {"input": text + "!"}]
        for fields, param in (({}, "inputs[1].input"), ({"instructions": text[:5000]}, "instructions")):
            answer = await client.post("/v1/audio/jobs", json={"voice": "ryan", "inputs": inputs, **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert answer.json()["error"]["code"] == "string_above_max_length"


async def test_an_unfinished_part_is_a_conflict_and_an_unknown_one_is_not_found(tmp_path: Path) -> None:
    speaker = Speaker()
    speaker.gate.clear()
    async with serving(tmp_path, speaker) as (_, client):
        place = f"/v1/audio/jobs/{(await started(client, 'One.'))['id']}"
        for path, status, code in (
            ("/parts/0", 409, "part_not_finished"),
            ("/parts/0/words", 409, "part_not_finished"),
            ("/audio", 409, "job_not_finished"),
            ("/parts/1", 404, "part_not_found"),
            ("/parts/one", 404, "not_found"),
            ("/parts/0?response_format=midi", 400, "invalid_value"),
        ):
            answer = await client.get(place + path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert (await client.get("/v1/audio/jobs/job_0")).json()["error"]["code"] == "job_not_found"


async def test_a_range_of_wav_is_that_of_the_whole(tmp_path: Path) -> None:
    async with serving(tmp_path, Speaker()) as (_, client):
        job = await started(client, "Hello there.", "And more.")
        await until(client, job, "completed")
        place = f"/v1/audio/jobs/{job['id']}/audio?response_format=wav"
        answered = await client.get(place)
        whole = answered.content
        assert b"trainedAlgorithmicMedia" in whole[:200]
        assert answered.headers["x-digital-source-type"].endswith("trainedAlgorithmicMedia")
        for span, wanted in (
            ("bytes=0-9", whole[:10]),
            ("bytes=40-50000", whole[40:50001]),
            ("bytes=-100", whole[-100:]),
            ("bytes=60000-", whole[60000:]),
        ):
            answer = await client.get(place, headers={"range": span})
            assert answer.status_code == 206
            assert answer.content == wanted
            assert answer.headers["content-range"].endswith(f"/{len(whole)}")
        beyond = await client.get(place, headers={"range": f"bytes={len(whole)}-"})
        assert beyond.status_code == 416
        assert (await client.get(place, headers={"range": "bytes=5-2"})).status_code == 200


async def test_after_a_death_only_running_segments_are_made_again(tmp_path: Path) -> None:
    texts = [f"Text number {number}." for number in range(12)]
    speaker = Speaker()
    first = Server(tmp_path, speaker, JobSettings(max_segments=2))
    first.start()
    async with first.client() as client:
        job = await started(client, *texts)
        await so(lambda: len(speaker.requests) > 6)
        speaker.gate.clear()
        await so(lambda: speaker.running == 2)
        await first.die()
    speaker.gate.set()
    async with serving(tmp_path, speaker) as (_, client):
        told = await until(client, job, "completed")
    assert told["segments"] == {"total": 12, "done": 12}
    asked = [request.request_id for request in speaker.requests]
    assert len(set(asked)) == 12
    assert len(asked) <= 14  # two were running
    seeds: dict[str, set[int]] = {}
    for request in speaker.requests:
        seeds.setdefault(request.request_id, set()).add(request.seed)
    assert all(len(each) == 1 for each in seeds.values())  # the same codes


async def test_a_full_store_pauses_and_the_job_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app.voices import voice_store as files

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


async def test_the_same_key_is_the_same_job(tmp_path: Path) -> None:
    async with serving(tmp_path, Speaker()) as (server, _), server.client(**{"idempotency-key": "one"}) as client:
        job, again = await started(client, "One."), await started(client, "One.")
        assert again["id"] == job["id"]
        other = await client.post("/v1/audio/jobs", json={"voice": "ryan", "inputs": [{"input": "Two."}]})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")


async def test_cancel_resume_delete(tmp_path: Path) -> None:
    speaker = Speaker()
    speaker.gate.clear()
    async with serving(tmp_path, speaker) as (_, client):
        job = await started(client, "One.", "Two.", "Three.")
        place = f"/v1/audio/jobs/{job['id']}"
        await so(lambda: speaker.running > 0)
        assert (await client.post(f"{place}/cancel")).json()["status"] == "cancelled"
        assert speaker.running == 0
        speaker.gate.set()
        assert (await client.post(f"{place}/resume")).json()["status"] in ("queued", "running")
        await until(client, job, "completed")
        assert (await client.delete(place)).json() == {"id": job["id"], "object": "audio.job.deleted", "deleted": True}
        assert (await client.get(place)).status_code == 404
        assert files_in(tmp_path) == []


async def test_a_deletion_comes_after_a_state_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(desk, "_REMOVAL_S", 0.01)
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


async def test_a_segment_that_waits_after_a_refusal_is_not_begun_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "_RETRY_S", 60)
    speaker = Speaker()
    async with serving(tmp_path, speaker) as (_, client):
        many = await started(client, *["Warm."] * 16)  # now the desk begins more than two at once
        await until(client, many, "completed")
        speaker.gate.clear()
        speaker.errors = [Overloaded("full")]
        job = await started(client, "Refused.", "Waits.")
        other = await started(client, "Beside it.")  # the desk looks what else may begin
        await so(lambda: speaker.running == 2)
        told = (await client.get(f"/v1/audio/jobs/{job['id']}")).json()
        assert (told["status"], [request.text for request in speaker.requests].count("Refused.")) == ("running", 1)
        await client.post(f"/v1/audio/jobs/{job['id']}/cancel")
        await so(lambda: speaker.running == 1)
        speaker.gate.set()
        await until(client, other, "completed")


async def test_a_refusal_waits_and_an_engine_that_fails_again_and_again_ends_the_job(tmp_path: Path) -> None:
    speaker = Speaker()
    speaker.errors = [Overloaded("full"), EngineError("once")]
    async with serving(tmp_path, speaker) as (_, client):
        await until(client, await started(client, "One."), "completed")
        speaker.errors = [EngineError("broken")] * 3
        told = await until(client, await started(client, "Two."), "failed")
        assert told["reason"] == "part 0, segment 0: broken"


async def test_a_segment_that_ends_badly_is_drawn_again_once_and_reported(tmp_path: Path) -> None:
    speaker = Speaker()
    async with serving(tmp_path, speaker) as (server, client):
        server.hindrance = "not yet"
        job = await started(client, "One.", "Two.")
        assert (await until(client, job, "paused"))["reason"] == "not yet"
        plan = server.desk._store().plan(server.desk._works[str(job["id"])].job, 0)
        speaker.reasons = {plan.parts[1].seed: FinishReason.LOOP}
        server.hindrance = None
        told = await until(client, job, "completed")
        assert told["problems"] == [{"part": 1, "segment": 0, "finish_reason": "stop", "redrawn": True}]
        assert len(speaker.requests) == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": ["text"]}, "inputs"),
        ({"inputs": [{"input": "a"}, {"text": 3}]}, "inputs[1].input"),
        ({"inputs": [{"input": "One."}], "speed": 9}, "speed"),
        ({"inputs": [{"input": "One.", "voice": "nobody"}]}, "inputs[0].voice"),
        ({"inputs": [{"input": "One."}], "ref_audio": "AAAA"}, "ref_audio"),
        ({"inputs": [{"input": "One."}], "input": "no"}, "input"),
        ({"inputs": [{"input": "One.", "custom_id": 3}]}, "inputs[0].custom_id"),
    ],
)
async def test_a_mistake_is_named_and_makes_no_job(tmp_path: Path, body: dict[str, object], param: str) -> None:
    async with serving(tmp_path, Speaker()) as (_, client):
        answer = await client.post("/v1/audio/jobs", json={"voice": "ryan", **body})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert (await client.get("/v1/audio/jobs")).json()["data"] == []


async def test_quotas(tmp_path: Path) -> None:
    async with serving(tmp_path, Speaker(), jobs=JobSettings(max_jobs=1, max_bytes=1)) as (_, client):
        job = await started(client, "One.", "Two.", "Three.", "Four.", "Five.")
        told = await until(client, job, "paused")
        assert "api.jobs.max_bytes" in str(told["reason"])
        full = await client.post("/v1/audio/jobs", json={"voice": "ryan", "inputs": [{"input": "Two."}]})
        assert (full.status_code, full.json()["error"]["code"]) == (409, "quota_exceeded")


async def test_fields_of_a_part_override_and_what_has_no_effect_is_told(tmp_path: Path) -> None:
    speaker = Speaker()
    async with serving(tmp_path, speaker) as (_, client):
        inputs = [{"input": "One.", "seed": 5}, {"input": "Two.", "voice": "vivian", "custom_id": "b"}]
        body = {"voice": "ryan", "seed": 7, "inputs": inputs, "response_format": "mp3", "sped": 2}
        answer = await client.post("/v1/audio/jobs", json=body)
        assert "response_format (asked for when audio is fetched)" in answer.headers["x-ignored"]
        assert "sped (unknown field, did you mean speed?)" in answer.headers["x-ignored"]
        await until(client, answer.json(), "completed")
        spoken = {request.text: (request.voice, request.seed) for request in speaker.requests}
        assert spoken == {"One.": ("ryan", 5), "Two.": ("vivian", 7)}


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
        assert told["reason"] == f"part 0, segment 0: the voice {voice['id']} was deleted"


async def test_another_key_sees_no_job(tmp_path: Path) -> None:
    keys = {name: create_key(tmp_path / "keys.json", name) for name in ("ada", "bob")}
    access = AccessSettings(keys_file=tmp_path / "keys.json")
    server = Server(tmp_path / "store", Speaker(), access=access)
    own, other = (server.client(authorization=f"Bearer {keys[name]}") for name in ("ada", "bob"))
    async with own, other:
        job = await started(own, "One.")
        place = f"/v1/audio/jobs/{job['id']}"
        assert (await other.get("/v1/audio/jobs")).json()["data"] == []
        for method, path in (
            ("GET", ""),
            ("GET", "/parts"),
            ("GET", "/parts/0"),
            ("GET", "/parts/0/words"),
            ("GET", "/audio"),
            ("POST", "/cancel"),
            ("POST", "/resume"),
            ("DELETE", ""),
        ):
            answer = await other.request(method, place + path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found"), path
        assert (await own.get(place)).status_code == 200


async def test_a_job_of_a_batch_stays_and_its_file_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenAI's batches are gone; their jobs and files may still lie in a store."""
    server = Server(tmp_path, Speaker())
    async with server.client() as client:
        job = await started(client, "One.")
    file = tmp_path / "files" / "-" / "file-0.61"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    store, records = VoiceStore(str(tmp_path)), {"jobs": {"batch": {}}, "states": {"mistake": None}, "plans": {}}
    for kind, fields in records.items():
        stored = json.loads((store.get(path := f"{kind}/{job['id']}.json")) or b'{"record": {}}')["record"] | fields
        for part in stored.get("parts", ()):
            part["response_format"] = None
        checksum = hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()
        store.put(path, json.dumps({"sha256": checksum, "record": stored}).encode())
    async with serving(tmp_path, Speaker()) as (_, client):
        await until(client, job, "completed")
    assert caplog.text.count("files of OpenAI's batches") == 1
    assert file.exists()
