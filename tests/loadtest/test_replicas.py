import json
from dataclasses import asdict
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtest.replicas import FILE, NoReplicaCountsError, ReplicaCount, ReplicaSample, parse, read_counts, read_samples
from loadtest.traces import LoadTestError, TraceFolder

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


@pytest.mark.anyio
@pytest.mark.parametrize("place", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "HOME"])
async def test_only_ray_gets_its_clusters_token(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def status(request: web.Request) -> web.Response:
        sent = request.headers.get("Authorization")
        if sent == "Bearer right":
            return web.json_response(STATUS)
        return web.Response(status=403 if sent else 401, text=f"Forbidden: {sent}")

    async def metrics(request: web.Request) -> web.Response:
        assert "Authorization" not in request.headers
        return web.Response(text='talkray_replicas_running{pool="codec"} 2')

    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home := str(tmp_path))
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    app = web.Application()
    app.router.add_get("/api/serve/applications/", status)
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("/api/serve/applications/"))
        with pytest.raises(LoadTestError, match=r"'Forbidden: None'\. Set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"):
            await read_counts(session, url)
        for token in ("right", "wrong"):
            file.write_text(f"{token}\n", encoding="utf-8")
            monkeypatch.setenv(place, {"RAY_AUTH_TOKEN": token, "RAY_AUTH_TOKEN_PATH": str(file)}.get(place, home))
            if token == "right":
                assert await read_counts(session, url) == parse(json.dumps(STATUS))
        with pytest.raises(LoadTestError, match=r"'Forbidden: Bearer wrong'\. Set RAY_AUTH_TOKEN"):
            await read_counts(session, url)
        assert await read_counts(session, str(server.make_url("/metrics"))) == {"codec": ReplicaCount(2, None)}
