"""Replicas that fit nowhere make the cluster grow; when they have gone, so do their nodes."""

import asyncio
import tempfile
from pathlib import Path

import pytest
from ray import serve

from deployments.config import TalkerConfig
from serve_app.cli.ray_settings import free_port
from serve_app.cli.serve.local_server import roll_out
from serve_app.config import AdmissionSettings, ApiSettings, AppConfig, PoolConfig, TalkerScalingConfig
from tests.e2e.speech import body, fetch
from tests.scale.conftest import client
from tests.scale.fake_nodes import fake_cluster, nodes
from tests.scale.pools import BOUND_S, until
from tests.scale.test_step_load import listen

pytestmark = pytest.mark.anyio

CONFIG = AppConfig(
    model="embedded",
    api=ApiSettings(admission=AdmissionSettings(max_line_s=100, max_wait_s=100, max_late_s=100)),
    talker=TalkerConfig(device="cpu", max_num_seqs=2),
    talker_pool=PoolConfig(num_cpus=0.1, num_gpus=1),
    codec_pool=PoolConfig(num_cpus=0.1),
    ingress_pool=PoolConfig(num_cpus=0.1),
    talker_scaling=TalkerScalingConfig(max_replicas=2, scale_down_window_s=3),
)
HEAD = {"CPU": 2}
GPU_NODE = {"gpu": {"resources": {"CPU": 1, "GPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2}}


async def have_gpu_nodes(count: int) -> None:
    async with asyncio.timeout(BOUND_S):
        while nodes()["gpu"] != count:  # noqa: ASYNC110, another process changes it
            await asyncio.sleep(0.2)


async def test_the_cluster_grows_for_talkers_that_fit_nowhere_and_shrinks_again() -> None:
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="talkray", ignore_cleanup_errors=True) as folder,
        fake_cluster(Path(folder), HEAD, GPU_NODE),
    ):
        assert nodes() == {"all": 1, "gpu": 0}
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        roll_out(CONFIG, print)
        assert nodes() == {"all": 2, "gpu": 1}  # for the first talker
        async with client(f"http://127.0.0.1:{port}") as http:
            enough = asyncio.Event()
            listeners = [asyncio.create_task(listen(http, number, enough)) for number in range(4)]
            await until(lambda sizes: sizes.talkers == (2, 2))
            assert nodes() == {"all": 3, "gpu": 2}
            enough.set()
            assert all(await asyncio.gather(*listeners))
            await until(lambda sizes: sizes.talkers == (1, 1))
            await have_gpu_nodes(1)
            assert len(await fetch(http, body())) > 0
        serve.shutdown()
