"""Hosts die, or say that they will: the streams whose ingress is elsewhere go on."""

from collections.abc import Iterator

import pytest

from serve_app.config import AppConfig, PoolConfig
from serve_app.speech.segments import Utterance
from tests.faults.hosts import Hosts, serving_on_hosts
from tools.suites.listening import Speaking, requests, wrong
from tools.suites.pools import config, tiny_model

AT_ONCE = 20
STREAMS = requests(AT_ONCE, frames=60)


def one_core_each(app: AppConfig) -> AppConfig:
    """Logical cores, so that hosts fill up one after the other."""

    def pool(of: PoolConfig) -> PoolConfig:
        return of.model_copy(update={"num_cpus": 1.0})

    pools = {name: pool(getattr(app, name)) for name in ("ingress_pool", "codec_pool", "talker_pool")}
    return app.model_copy(update=pools)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    app = config(tiny_model(tmp_path_factory.mktemp("model") / "tiny"), talkers=3, codecs=3)
    with serving_on_hosts(one_core_each(app), hosts=4, cpus=2) as hosts:
        yield hosts


def begun(streams: list[Utterance], *, at_once: int = AT_ONCE) -> Speaking:
    speaking = Speaking(streams, at_once=at_once)
    speaking.go_on(may_begin=True)
    speaking.begun()
    return speaking


def test_a_host_that_will_be_gone_hands_its_streams_over(hosts: Hosts) -> None:
    minutes = requests(6, frames=500)
    expected = Speaking(minutes, at_once=6).finish()
    speaking = begun(minutes * 20, at_once=len(minutes))
    leaving = hosts.busiest()
    assert hosts.num_replicas(leaving)
    hosts.drain(leaving, within_s=300)
    while hosts.num_replicas(leaving):
        assert not speaking.done, "the streams ended before the host was empty"
        speaking.go_on(may_begin=True)
    speaking.drop_rest()
    assert wrong(speaking.finish(), expected) == []
    hosts.kill(leaving)


def test_a_host_that_is_gone_takes_no_stream_with_it(hosts: Hosts) -> None:
    expected = Speaking(STREAMS, at_once=AT_ONCE).finish()
    speaking = begun(STREAMS)
    assert hosts.kill(hosts.busiest()) > 0
    assert wrong(speaking.finish(), expected) == []
