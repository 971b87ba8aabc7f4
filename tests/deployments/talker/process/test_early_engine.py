"""The engine that `talkray serve` starts beside Ray, and the replica that claims it."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from deployments.config import CodecConfig
from deployments.errors import TalkerLost
from deployments.talker.process import channel
from deployments.talker.process.engine_client import EngineClient
from serve_app.cli.serve import early_engine
from serve_app.cli.serve.run_folder import RunFolder
from serve_app.config import AppConfig, PoolConfig, ServedModel, TalkerScalingConfig
from tests.deployments.talker.conftest import CONFIG
from tests.deployments.talker.driving import ask

pytestmark = pytest.mark.anyio
ON_GPU = PoolConfig(num_gpus=1)


@pytest.fixture
def begin(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[str, "subprocess.Popen[bytes]"]]:
    """Start a tiny checkpoint's engine early: the model, and the process."""
    started, real = list[Any](), subprocess.Popen
    monkeypatch.setenv(channel.EARLY_ENGINE, "")  # restored after the test
    monkeypatch.setattr("deployments.gpu.card.Path", lambda place: tmp_path / "no-gpu")

    def start(*args: Any, **kwargs: Any) -> Any:
        started.append(real(*args, **kwargs))
        return started[-1]

    def begin() -> tuple[str, "subprocess.Popen[bytes]"]:
        model = str(tiny_checkpoint("CustomVoice"))
        with monkeypatch.context() as patch:
            patch.setattr(early_engine.subprocess, "Popen", start)
            early_engine.begin(AppConfig(model=model, talker=CONFIG), RunFolder(tmp_path), Mock())
        return model, started[0]

    return begin


async def test_the_first_replica_claims_the_engine_and_the_next_starts_its_own(begin: Callable[[], Any]) -> None:
    model, process = begin()
    clients = [EngineClient(model, CONFIG) for _ in range(2)]
    pids = [client._process.pid for client in clients]
    assert [pid == process.pid for pid in pids] == [True, False]
    for client in clients:
        assert sum([len(chunk.codes) async for chunk in client.stream_frames(ask(frames=3, ignore_eos=True))]) == 3
        assert client.is_alive
        client.stop()
        assert not client.is_alive
    assert process.wait(10) == 0


async def test_a_claimed_engine_that_dies_is_noticed(begin: Callable[[], Any]) -> None:
    model, process = begin()
    client = EngineClient(model, CONFIG)
    client._process.kill()
    assert (client._process.wait(10), client.is_alive) == (-1, False)
    client._process.kill()  # has no effect
    with pytest.raises(TalkerLost, match=r"code -1"):
        await anext(client.stream_frames(ask()))
    client.stop()
    assert process.wait(10) == -9


def test_an_engine_that_no_replica_wants_ends(begin: Callable[[], Any]) -> None:
    model, process = begin()
    client = EngineClient(model, CONFIG.model_copy(update={"max_num_waiting": 7}))
    assert client._process.pid != process.pid
    assert process.wait(10) == 0
    client.stop()


@pytest.mark.parametrize(("config", "gpus", "visible", "starts"), [
    (AppConfig(model="m"), 0, None, True),
    (AppConfig(model="m"), 1, None, False),  # the talker may use the GPU, or not
    (AppConfig(model="m"), 1, "", True),
    (AppConfig(model="m", talker_pool=ON_GPU), 1, None, True),
    (AppConfig(model="m", talker_pool=ON_GPU), 0, None, False),
    (AppConfig(model="m", talker_pool=ON_GPU), 2, None, False),  # Ray chooses the GPU
    (AppConfig(model="m", talker_pool=ON_GPU), 2, "1", True),
    (AppConfig(model="m", talker_pool=PoolConfig(replicas=2)), 0, None, False),
    (AppConfig(model="m", talker_scaling=TalkerScalingConfig()), 0, None, False),
    (AppConfig(models=(ServedModel(name="a", model="m"), ServedModel(name="b", model="n"))), 0, None, False),
    (AppConfig(model="m", codec=CodecConfig(placement="pool")), 0, None, True),
])  # fmt: skip
def test_it_starts_only_if_the_replica_is_certain_to_want_it(
    config: AppConfig, gpus: int, visible: str | None, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(channel.EARLY_ENGINE, "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(early_engine, "count_gpus", lambda: gpus)
    monkeypatch.setattr(early_engine.threading, "Thread", thread := Mock())
    monkeypatch.setattr(early_engine.subprocess, "Popen", popen := Mock())
    early_engine.begin(config, RunFolder(tmp_path), report := Mock())
    assert (popen.called, report.called) == (starts, starts)
    if starts:
        for left in thread.call_args.kwargs["args"][:2]:
            left.close()
        start = channel.EngineStart.model_validate_json(popen.call_args.args[0][-1])
        assert start == channel.EngineStart(
            model="m", config=config.talker, makes_audio=config.codec.placement != "pool"
        )
