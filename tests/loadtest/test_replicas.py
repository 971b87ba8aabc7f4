import json
from dataclasses import asdict
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtest.replicas import FILE, NoReplicaCountsError, ReplicaCount, ReplicaSample, parse, read_counts, read_samples
from loadtest.traces import TraceFolder

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


def test_running_and_wanted_replicas_are_counted_over_all_applications() -> None:
    assert parse(json.dumps(STATUS)) == {"Talker": ReplicaCount(3, None), "Ingress": ReplicaCount(0, 1)}


@pytest.mark.parametrize("document", [{}, [], None, {"applications": {"a": {}}}, {"applications": {"a": None}}])
def test_another_document_is_not_taken_for_a_status(document: object) -> None:
    with pytest.raises(NoReplicaCountsError, match="not the status of Ray Serve"):
        parse(json.dumps(document))


def test_what_is_no_json_is_no_status() -> None:
    with pytest.raises(NoReplicaCountsError, match="invalid JSON"):
        parse("<html>")


METRICS = """# HELP ray_talkray_replicas_running Replicas that take requests.
ray_talkray_replicas_running{Component="core_worker",pool="talker",WorkerId="a"} 1.0
ray_talkray_replicas_running{Component="core_worker",pool="talker",WorkerId="b"} 2.0
ray_talkray_replicas_wanted{pool="talker",WorkerId="b"} 3.0
ray_talkray_replicas_running{WorkerId="b",pool="codec"} 1.0
ray_talkray_queue_depth{pool="talker",WorkerId="c"} 7.0
"""


def test_metrics_tell_the_counts_of_each_pool() -> None:
    assert parse(METRICS) == {"talker": ReplicaCount(2, 3), "codec": ReplicaCount(1, None)}
    with pytest.raises(NoReplicaCountsError, match="talkray_replicas_running"):
        parse("up 1\n")


def test_samples_survive_their_file(tmp_path: Path) -> None:
    sample = ReplicaSample(1.5, {"Talker": ReplicaCount(2, 3)})
    TraceFolder(tmp_path).append(FILE, asdict(sample))
    assert read_samples(TraceFolder(tmp_path)) == [sample]
    assert read_samples(TraceFolder(tmp_path / "none")) == []


@pytest.mark.anyio
async def test_a_status_url_that_tells_no_counts_is_an_error() -> None:
    async def missing(_: web.Request) -> web.Response:
        return web.Response(status=404)

    async def status(_: web.Request) -> web.Response:
        return web.json_response(STATUS)

    app = web.Application()
    app.router.add_get("/status", status)
    app.router.add_get("/missing", missing)
    async with TestServer(app) as server:
        url = str(server.make_url("/status"))
        async with aiohttp.ClientSession() as session:
            assert await read_counts(session, url) == parse(json.dumps(STATUS))
            with pytest.raises(NoReplicaCountsError, match="HTTP 404"):
                await read_counts(session, str(server.make_url("/missing")))
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await read_counts(session, url)
