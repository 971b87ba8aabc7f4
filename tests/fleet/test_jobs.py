"""A job while the node that makes it dies, and the head: no segment is missing, and none is made twice."""

import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
import pytest
from moto.moto_server.threaded_moto_server import ThreadedMotoServer

from serve_app.extensions.jobs.job_store import JobStore
from serve_app.extensions.voices.voice_store import VoiceStore
from tools.experiments.fleet.fleet import CODECS, JOBS, TALKER, TALKERS, Fleet, fleet, scaled_down

PATH, BUCKET = "/v1/audio/jobs", "voices"
PARTS, AT_ONCE = 80, 32
BODY = {"voice": "alloy", "seed": 3, "max_new_tokens": 25, "ignore_eos": True, "deterministic": True}
INPUTS = [{"input": f"The text of part number {number}, which is short."} for number in range(PARTS)]


@dataclass(slots=True)
class Bucket:
    """S3 as moto plays it, which keeps each version of an object that is written again."""

    client: Any
    store: JobStore

    def codes(self, job: str) -> dict[tuple[int, int], bytes]:
        """Of each segment that is there."""
        made = [each for each, _ in self.store.made(job)]
        return {(each.id.part, each.id.segment): self.store.content(job, each).codes.tobytes() for each in made}

    def writes(self, job: str) -> Counter[str]:
        """How often each segment was kept, by its place: its name has the place in front."""
        pages = self.client.get_paginator("list_object_versions").paginate(Bucket=BUCKET, Prefix=f"segments/{job}/")
        return Counter(version["Key"] for page in pages for version in page.get("Versions", ()))


@dataclass(slots=True)
class Making:
    """A fleet that makes jobs: talkers and the replica of jobs on one kind of node, doors on the other."""

    fleet: Fleet
    bucket: Bucket
    expected: dict[tuple[int, int], bytes] = field(default_factory=dict)  # codes of a job that nothing disturbed

    def ask(self, path: str, body: object = None) -> dict[str, Any]:
        """Through the door of a codec node; asked again while no replica answers."""
        (door,) = [each for each in self.fleet.workers if each.name.startswith(CODECS)]
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.fleet.url(door) + path, content)
        request.add_header("authorization", f"Bearer {self.fleet.key}")
        told: dict[str, Any] = {}

        def answered() -> bool:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    told.update(json.load(answer))
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from error
                return False
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                return False
            return True

        self.fleet.wait(answered, f"an answer of {path}")
        return told

    def begin(self) -> str:
        return str(self.ask(PATH, {**BODY, "inputs": INPUTS})["id"])

    def reach(self, job: str, segments: int) -> int:
        """Return once at least so many are made, with their number."""
        told: dict[str, Any] = {}

        def reached() -> bool:
            told.update(self.ask(f"{PATH}/{job}"))
            assert told["status"] in ("queued", "running", "paused", "completed"), told
            return bool(told["segments"]["done"] >= segments)

        self.fleet.wait(reached, f"{segments} segments")
        return int(told["segments"]["done"])

    def check(self, job: str) -> None:
        """It is complete, as if nothing had happened, and what was kept once was not made again."""
        self.reach(job, PARTS)
        assert self.ask(f"{PATH}/{job}")["status"] == "completed"
        writes = self.bucket.writes(job)
        assert len(writes) == PARTS
        assert set(writes.values()) == {1}, writes
        assert self.bucket.codes(job) == self.expected


@pytest.fixture(scope="module")
def making(possible: None) -> Iterator[Making]:
    with fleet() as made, pytest.MonkeyPatch.context() as patch:
        server = ThreadedMotoServer(ip_address=made.net.gateway, port=0)
        server.start()
        host, port = server.get_host_and_port()
        environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1",
        }  # fmt: skip
        for name, value in environment.items():
            patch.setenv(name, value)
        made.environment |= environment
        client = boto3.client("s3", endpoint_url=environment["AWS_ENDPOINT_URL"], region_name="us-east-1")
        client.create_bucket(Bucket=BUCKET)
        client.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
        made.keep_in_redis()
        made.start_head()
        for pool in (TALKERS, CODECS):
            made.add(f"{pool}1", pool)
        api = {"voices": {"store": f"s3://{BUCKET}"}}
        made.deploy(scaled_down(made, api={**api, "jobs": {"pool": {"label_selector": {"pool": TALKERS}}}}))
        making = Making(made, Bucket(client, JobStore(VoiceStore(f"s3://{BUCKET}"))))
        made.open_doors(made.workers)
        undisturbed = making.begin()
        making.reach(undisturbed, PARTS)
        making.expected = making.bucket.codes(undisturbed)
        assert len(making.expected) == PARTS
        yield making
        server.stop()


def test_the_node_that_makes_a_job_dies(making: Making) -> None:
    """With both talkers and the replica of jobs; another node has joined before."""
    fleet = making.fleet
    (jobs,) = fleet.replicas(JOBS)
    victim = fleet.machine(jobs.node)
    assert [each.node for each in fleet.replicas(TALKER)] == [victim.address] * 2
    joined = fleet.add(f"{TALKERS}2", TALKERS)
    job = making.begin()
    making.reach(job, PARTS // 4)
    victim.kill()
    killed_s = time.monotonic()
    done = len(making.bucket.writes(job))
    making.reach(job, done + 1)
    took_s = time.monotonic() - killed_s
    print(f"{victim.name} died with {done} of {PARTS} segments made: the next came {took_s:.0f} s later")
    making.check(job)
    assert [each.node for each in (*fleet.replicas(TALKER), *fleet.replicas(JOBS))] == [joined.address] * 3


def test_the_head_dies_and_comes_back_under_a_job(making: Making) -> None:
    """The job goes on without it. Then the replica of jobs dies too: nobody replaces it before the head is back."""
    fleet = making.fleet
    job = making.begin()
    done = making.reach(job, PARTS // 8)
    (jobs,) = fleet.replicas(JOBS)
    fleet.kill_head()
    killed_s = time.monotonic()
    without = making.reach(job, done + AT_ONCE + 1)  # more than had begun
    assert without < PARTS, "the job ended before the head was missed"
    print(f"without a head {without - done} more segments in {time.monotonic() - killed_s:.0f} s")
    fleet.machine(jobs.node).kill(jobs.pid)
    kept = len(making.bucket.writes(job))
    back_s = time.monotonic()
    fleet.start_head()
    start_s = time.monotonic() - back_s
    making.reach(job, kept + 1)
    took_s = time.monotonic() - back_s
    print(f"the head took {start_s:.0f} s to start, and the next segment came {took_s:.0f} s after its command")
    making.check(job)
    assert jobs.id not in [each.id for each in fleet.replicas(JOBS)]
