"""A job while everything around it is killed, updated and started again: no segment is missing, none is there twice."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path

from serve_app.config import AppConfig
from serve_app.extensions.jobs.job_store import JobStore
from serve_app.extensions.jobs.settings import JobSettings
from serve_app.extensions.jobs.stored_job import MadeSegment
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.extensions.voices.voice_store import VoiceStore
from tools.suites.pools import CODEC, ENGINE, TALKER, Service, config, redeploy, serving, tiny_model
from tools.suites.raw import ask

JOBS, PATH = "Jobs", "/v1/audio/jobs"
PARTS = 80
BODY = {"voice": "ryan", "seed": 3, "max_new_tokens": 25, "ignore_eos": True, "deterministic": True}
INPUTS = [{"input": f"The text of part number {number}, which is short."} for number in range(PARTS)]
_BOUND_S = 300.0
LEFT_S = 5.0


def app(tmp_path: Path) -> AppConfig:
    pools = config(tiny_model(tmp_path / "model"))
    api = pools.api.model_copy(update={"voices": VoiceSettings(store=str(tmp_path / "store"))})
    return pools.model_copy(update={"api": api})


def asked(
    service: Service, path: str, body: Mapping[str, object] | None = None, *, method: str = ""
) -> dict[str, object]:
    """Asked again while no replica answers. A 404 is an answer."""
    until_s, port = time.monotonic() + 60, int(service.url.rpartition(":")[2])
    operation = f"{method or ('GET' if body is None else 'POST')} {path}"
    while True:
        status, content = 503, b""
        with contextlib.suppress(OSError, HTTPException):
            status, _, content = ask(port, body, operation=operation)
        if status < 300:
            answered: dict[str, object] = json.loads(content)
            return answered
        assert status in (503, 504), content
        assert time.monotonic() < until_s
        time.sleep(0.2)


def reach(service: Service, job: str, segments: int) -> None:
    until_s = time.monotonic() + _BOUND_S
    while (state := asked(service, f"{PATH}/{job}"))["segments"]["done"] < segments:  # type: ignore[index]
        assert state["status"] in ("queued", "running", "paused"), state
        assert time.monotonic() < until_s, state
        time.sleep(0.05)


def begin(service: Service) -> str:
    return str(asked(service, PATH, {**BODY, "inputs": INPUTS})["id"])


def codes(tmp_path: Path, job: str) -> dict[str, bytes]:
    """Of each segment that lies in the store: there is one object for each."""
    store = JobStore(VoiceStore(str(tmp_path / "store")))
    made = [each for each, _ in store.made(job)]
    # A kill may leave a file that has no name yet, which the next sweep removes.
    files = [file for file in (tmp_path / "store" / "segments" / job).iterdir() if file.suffix != ".new"]
    assert len(made) == len(files) == len({each.id for each in made}), "one is there twice"
    return {_place(each): store.content(job, each).codes.tobytes() for each in made}


def _place(made: MadeSegment) -> str:
    return f"{made.id.part}.{made.id.segment}"


def test_kills_an_update_and_a_restart_leave_each_segment_made_once(tmp_path: Path) -> None:
    application = app(tmp_path)
    with serving(application) as service:
        undisturbed = begin(service)
        reach(service, undisturbed, PARTS)
        job = begin(service)
        for done, title in ((5, TALKER), (15, CODEC), (25, JOBS), (35, ENGINE), (45, JOBS)):
            reach(service, job, done)
            service.kill(service.processes(title)[0])
        reach(service, job, 50)
        service.wait_for(TALKER, 2)
        redeploy(application, {TALKER: 1, CODEC: 1})  # replicas go while they speak
        reach(service, job, 60)
        for process in service.processes_titled("ServeReplica"):  # all of the server's replicas at once
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    with serving(application) as service:
        reach(service, job, PARTS)
        assert asked(service, f"{PATH}/{job}")["status"] == "completed"
    wanted = codes(tmp_path, undisturbed)
    assert len(wanted) == PARTS
    assert codes(tmp_path, job) == wanted


def test_a_job_that_is_deleted_while_it_runs_leaves_nothing(tmp_path: Path) -> None:
    with serving(app(tmp_path)) as service:
        for _ in range(3):
            job = begin(service)
            reach(service, job, 6)
            assert asked(service, f"{PATH}/{job}", method="DELETE")["deleted"]
            time.sleep(LEFT_S)  # for what was running to end, if it were not cancelled
            left = [file for file in (tmp_path / "store").rglob("*") if job in str(file) and file.is_file()]
            assert not left


def test_jobs_are_made_and_cancelled_while_their_replica_is_replaced(tmp_path: Path) -> None:
    """Whatever replica answers knows each job that was confirmed, and none goes on that was cancelled."""
    application = app(tmp_path)
    settings = JobSettings(max_jobs=99)
    changed = application.model_copy(update={"api": application.api.model_copy(update={"jobs": settings})})
    with serving(application) as service:
        before = service.processes(JOBS)
        kept: list[str] = []
        cancelled: list[str] = []
        redeploy(changed, {})
        until_s = time.monotonic() + 60
        while (replaced := service.processes(JOBS)) == before or len(replaced) > 1 or len(kept) < 6:
            kept.append(begin(service))
            cancelled.append(begin(service))
            assert asked(service, f"{PATH}/{cancelled[-1]}/cancel", {})["status"] == "cancelled"
            for job in kept:
                assert asked(service, f"{PATH}/{job}")["status"] in ("queued", "running", "completed")
            assert time.monotonic() < until_s
        reach(service, kept[0], PARTS)
        assert {asked(service, f"{PATH}/{job}")["status"] for job in cancelled} == {"cancelled"}
