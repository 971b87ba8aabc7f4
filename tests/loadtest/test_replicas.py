import json
from dataclasses import asdict
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtest.replicas import (
    FILE,
    NoReplicaCountsError,
    ReplicaCount,
    ReplicaWatch,
    Sample,
    parse_metrics,
    parse_status,
    read_samples,
)
from loadtest.traces import RunFolder

STATUS = {
    "applications": {
        "talkray": {
            "deployments": {
                "Talker": {
                    "target_num_replicas": 3,
                    "replicas": [{"state": "RUNNING"}, {"state": "STARTING"}, {"state": "RUNNING"}],
                },
                "Ingress": {"target_num_replicas": 1, "replicas": []},
            }
        },
        "other": {"deployments": {"Talker": {"replicas": [{"state": "RUNNING"}]}}},
    }
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_running_and_wanted_replicas_are_counted_over_all_applications() -> None:
    assert parse_status(json.dumps(STATUS)) == {"Talker": ReplicaCount(3, None), "Ingress": ReplicaCount(0, 1)}


@pytest.mark.parametrize("document", [{}, [], None, {"applications": {"a": {}}}, {"applications": {"a": None}}])
def test_another_document_is_not_taken_for_a_status(document: object) -> None:
    with pytest.raises(NoReplicaCountsError, match="not the status of Ray Serve"):
        parse_status(json.dumps(document))


def test_what_is_no_json_is_no_status() -> None:
    with pytest.raises(NoReplicaCountsError, match="no JSON"):
        parse_status("<html>")


METRICS = """# HELP ray_talkray_replicas_running Replicas that take requests.
ray_talkray_replicas_running{Component="core_worker",pool="talker",WorkerId="a"} 1.0
ray_talkray_replicas_running{Component="core_worker",pool="talker",WorkerId="b"} 2.0
ray_talkray_replicas_wanted{pool="talker",WorkerId="b"} 3.0
ray_talkray_replicas_running{WorkerId="b",pool="codec"} 1.0
ray_talkray_queue_depth{pool="talker",WorkerId="c"} 7.0
"""


def test_metrics_tell_the_counts_of_each_pool() -> None:
    assert parse_metrics(METRICS) == {"talker": ReplicaCount(2, 3), "codec": ReplicaCount(1, None)}
    with pytest.raises(NoReplicaCountsError, match="talkray_replicas_running"):
        parse_metrics("up 1\n")


def test_samples_survive_their_file(tmp_path: Path) -> None:
    sample = Sample(1.5, {"Talker": ReplicaCount(2, 3)})
    RunFolder(tmp_path).append(FILE, asdict(sample))
    assert read_samples(RunFolder(tmp_path)) == [sample]
    assert read_samples(RunFolder(tmp_path / "none")) == []


@pytest.mark.anyio
async def test_a_status_url_is_checked_before_the_run(tmp_path: Path) -> None:
    async def missing(_: web.Request) -> web.Response:
        return web.Response(status=404)

    async def status(_: web.Request) -> web.Response:
        return web.json_response(STATUS)

    app = web.Application()
    app.router.add_get("/status", status)
    app.router.add_get("/missing", missing)
    async with TestServer(app) as server:
        url = str(server.make_url("/status"))
        await ReplicaWatch(url, RunFolder(tmp_path), parse=parse_status).check()
        with pytest.raises(NoReplicaCountsError, match="HTTP 404"):
            await ReplicaWatch(str(server.make_url("/missing")), RunFolder(tmp_path), parse=parse_status).check()
    with pytest.raises(aiohttp.ClientError):
        await ReplicaWatch(url, RunFolder(tmp_path), parse=parse_status).check()
