"""Prometheus scrapes a server that speaks, and evaluates the rules that are shipped."""

import asyncio
import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from serve_app.cli.ray_settings import free_port
from serve_app.config import AppConfig
from tests.e2e.speech import body, fetch
from tests.scale.conftest import client, server

pytestmark = pytest.mark.anyio

MONITORING = Path(__file__).parents[2] / "cluster" / "monitoring"
BOUND_S = 90
SAMPLE_S = 2 * 24000


def test_the_rules_are_valid(prometheus_bin: Path) -> None:
    subprocess.run([prometheus_bin / "promtool", "check", "rules", MONITORING / "alerts.yaml"], check=True)
    subprocess.run([prometheus_bin / "promtool", "check", "config", MONITORING / "prometheus.yaml"], check=True)


@contextlib.contextmanager
def prometheus(binaries: Path, folder: Path, target: str) -> Iterator[str]:
    """Base URL of a Prometheus that scrapes `target` as the shipped configuration says, only more often."""
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "alerts.yaml").write_text((MONITORING / "alerts.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [
        binaries / "prometheus", f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://{address}"
        finally:
            process.terminate()


async def query(http: aiohttp.ClientSession, expression: str) -> dict[tuple[str, ...], float]:
    """Values by their labels, in the labels' order."""
    with contextlib.suppress(aiohttp.ClientConnectorError):  # it is starting
        async with http.get("/api/v1/query", params={"query": expression}) as answer:
            result = (await answer.json())["data"]["result"]
            return {tuple(each["metric"].values()): float(each["value"][1]) for each in result}
    return {}


async def until(
    http: aiohttp.ClientSession, expression: str, holds: Callable[[dict[tuple[str, ...], float]], bool]
) -> None:
    async with asyncio.timeout(BOUND_S):
        while not holds(await query(http, expression)):  # noqa: ASYNC110, another process changes it
            await asyncio.sleep(0.5)


async def test_prometheus_sees_what_was_spoken(prometheus_bin: Path, tmp_path: Path) -> None:
    with (
        server(AppConfig(model="embedded")) as url,
        prometheus(prometheus_bin, tmp_path, url.removeprefix("http://")) as watch_url,
    ):
        async with client(url) as http, client(watch_url) as watch:
            spoken = [await fetch(http, body(seed=seed, ignore_eos=True, max_new_tokens=21)) for seed in range(3)]
            audio_s = sum(len(pcm) for pcm in spoken) / SAMPLE_S
            for name in ("ttfb", "ttfp"):
                expression = f"sum(ray_talkray_{name}_seconds_count)"
                await until(watch, expression, lambda found: found == {(): 3.0})
            await until(
                watch,
                "sum(ray_talkray_audio_seconds_total)",
                lambda found: found.get((), 0) == pytest.approx(audio_s, abs=0.01),
            )
            await until(
                watch,
                "max by (pool) (ray_talkray_replicas_running)",
                lambda found: found == {(pool,): 1.0 for pool in ("talker", "codec", "ingress", "jobs")},
            )
            await until(
                watch,
                "sum by (pool) (ray_talkray_step_seconds_count)",
                lambda found: found.keys() == {("talker",), ("codec",)} and min(found.values()) > 0,
            )
            assert await rules(watch) >= {"TalkrayIngressNearlyFull", "TalkrayRefusing", "TalkrayReplicasMissing"}


async def rules(http: aiohttp.ClientSession) -> set[str]:
    """Names of the alerts whose expressions could be evaluated."""
    async with http.get("/api/v1/rules") as answer:
        groups: list[dict[str, Any]] = (await answer.json())["data"]["groups"]
    return {rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "ok"}
