"""Each panel of the dashboard shows data after a kill, a refusal, a clone and more load than there is room for."""

import asyncio
import contextlib
import json
import math
import uuid
from pathlib import Path

import aiohttp
import pytest

from serve_app.config import AdmissionSettings
from tests.e2e.speech import PATH, body
from tests.prometheus.test_scrape import MONITORING, prometheus, query, until
from tests.scale.conftest import client
from tests.serve_app.audio.test_recordings import data_url, recording
from tools.suites.application import running
from tools.suites.pools import CODEC, TALKER, Service, config, tiny_model
from tools.suites.processes import MARK

pytestmark = pytest.mark.anyio

BOUND_S = 240
STREAMS = 6
CLONE = {"ref_audio": data_url(recording(4.0)), "x_vector_only_mode": True}


def expressions() -> dict[str, str]:
    """Of all panels, by the panel's title and the expression's letter."""
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return {f"{view['title']}: {each['refId']}": each["expr"] for view in board["panels"] for each in view["targets"]}


async def ask(http: aiohttp.ClientSession, frames: int, **fields: object) -> int:
    asked = body(ignore_eos=True, max_new_tokens=frames, **fields)
    with contextlib.suppress(aiohttp.ClientPayloadError):
        async with http.post(PATH, json=asked, headers={"x-server-timing": "1"}) as answer:
            await answer.read()
            return answer.status
    return 0


async def misfortunes(http: aiohttp.ClientSession, service: Service) -> dict[str, list[int]]:
    seen = {"clone": [await ask(http, 10, **CLONE) for _ in range(2)]}
    streams = [asyncio.create_task(ask(http, 150, **CLONE, seed=seed)) for seed in range(2)]
    await asyncio.sleep(1.0)  # they speak
    for pool in (TALKER, CODEC):
        service.kill(service.processes(pool)[0])
    seen["kill"] = list(await asyncio.gather(*streams))
    service.wait_for(TALKER, 2)
    service.wait_for(CODEC, 2)
    seen["overload"] = list(await asyncio.gather(*(ask(http, 60, **CLONE, seed=seed) for seed in range(4 * STREAMS))))
    return seen


async def test_every_panel_shows_data(prometheus_bin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    app = config(tiny_model(tmp_path / "model", "Base"))
    api = app.api.model_copy(update={"admission": AdmissionSettings(max_streams=STREAMS, max_wait_s=60, max_line_s=60)})
    app = app.model_copy(update={"api": api})
    (tmp_path / "watch").mkdir()
    with running(app) as url, prometheus(prometheus_bin, tmp_path / "watch", url.removeprefix("http://")) as watch_url:
        async with client(url) as http, client(watch_url) as watch:
            zero = "sum(ray_talkray_failovers_total) + sum(ray_talkray_refusals_total)"
            async with asyncio.timeout(BOUND_S):
                while await query(watch, zero) != {(): 0.0}:  # noqa: ASYNC110, another process changes it
                    await asyncio.sleep(0.5)
            seen = await misfortunes(http, Service(url, mark, app))
            assert seen["clone"] == seen["kill"] == [200, 200]
            assert set(seen["overload"]) == {200, 429}
            missing = expressions()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BOUND_S):
                    while missing:
                        missing = {name: each for name, each in missing.items() if not await has_data(watch, each)}
                        await asyncio.gather(*(ask(http, 10, **CLONE, seed=n) for n in range(2)), asyncio.sleep(1))
            assert missing == {}
            counted = (
                "sum(increase(ray_talkray_failovers_total[10m]))",
                "sum(increase(ray_talkray_refusals_total[10m]))",
                'max(ray_talkray_replicas_died{pool="talker"})',
            )
            for expression in counted:
                await until(watch, expression, lambda found: max(found.values(), default=0) > 0)


async def has_data(watch: aiohttp.ClientSession, expression: str) -> bool:
    return any(math.isfinite(value) for value in (await query(watch, expression)).values())
