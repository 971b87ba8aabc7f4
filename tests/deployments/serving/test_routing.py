"""The router as Serve makes it, with replicas that only say where they are and how much they have to do."""

import asyncio
import pickle
from collections import Counter
from dataclasses import replace

import pytest
from ray import cloudpickle
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest
from ray.serve.config import RequestRouterConfig

from deployments.protocol import SynthesisRequest
from deployments.serving.handles import LeastBusy

pytestmark = pytest.mark.anyio

HERE, THERE = "a" * 56, "b" * 56
POOL = DeploymentID("Codec", "talkray")
REQUEST = SynthesisRequest("r", "Hello.")


class Replica:
    def __init__(self, number: int, node_id: str, queue_len: int) -> None:
        self.replica_id = ReplicaID(f"{number:08}", POOL)
        self.node_id, self.availability_zone = node_id, None
        self.max_ongoing_requests = 12
        self.multiplexed_model_ids: set[str] = set()
        self.queue_len = queue_len


def router(*replicas: Replica) -> LeastBusy:
    """One on the first node, with its knowledge of queues."""
    made = LeastBusy(
        deployment_id=POOL, handle_source=DeploymentHandleSource.REPLICA, self_node_id=HERE,
        use_replica_queue_len_cache=True, create_replica_wrapper_func=lambda replica: replica,
        event_loop=asyncio.get_running_loop(),
    )  # fmt: skip
    made._replicas = {each.replica_id: each for each in replicas}
    made._replicas_list, made._replica_id_set = list(replicas), set(made._replicas)
    made._update_colocated_replica_ids_with_replicas(list(replicas))
    for each in replicas:
        made.replica_queue_len_cache.update(each.replica_id, each.queue_len)
    return made


async def chosen(router: LeastBusy, request: object) -> str:
    pending = PendingRequest([request] if request else [], {}, RequestMetadata("r", "i"))
    for candidates in await router.choose_replicas(router._replicas_list, pending):
        replica = await router._select_from_candidate_replicas(candidates, 0)
        assert pending.routing_context.should_backoff, "where all are full Serve would ask again without a pause"
        return str(replica.node_id)
    raise AssertionError("nobody was chosen")


async def choices(replicas: list[Replica], request: object = REQUEST, times: int = 200) -> Counter[str]:
    return Counter([await chosen(router(*replicas), request) for _ in range(times)])


@pytest.mark.parametrize("request_", [REQUEST, None])
@pytest.mark.parametrize(("queues", "node_id"), [
    ([(HERE, 3), *[(THERE, 3)] * 7], HERE),
    ([(HERE, 4), (HERE, 3), (THERE, 2), (THERE, 2)], THERE),  # the own node has more to do
    ([(HERE, 3), (HERE, 1), (THERE, 2)], HERE),  # all replicas of the own node take part
    ([(HERE, 0)] * 2, HERE), ([(THERE, 0)] * 2, THERE),  # all on one side
])  # fmt: skip
async def test_own_nodes_are_taken_unless_busier(queues: list[tuple[str, int]], node_id: str, request_: object) -> None:
    replicas = [Replica(number, *where) for number, where in enumerate(queues)]
    assert await choices(replicas, request_) == {node_id: 200}


async def test_what_is_asked_again_may_go_anywhere() -> None:
    replicas = [Replica(0, HERE, 0), Replica(1, THERE, 0)]
    counts = await choices(replicas, replace(REQUEST, is_retry=True))
    assert 50 < counts[HERE] < 150


async def test_the_one_with_the_least_to_do_of_all() -> None:
    replicas = [Replica(number, HERE if number % 2 else THERE, 3) for number in range(9)]
    for idle in replicas:
        idle.queue_len = 2
        made = router(*replicas)
        for _ in range(20):
            (candidates,) = await made.choose_replicas(replicas, None)
            assert await made._select_from_candidate_replicas(candidates, 0) is idle
        idle.queue_len = 3


@pytest.mark.parametrize(("here", "own"), [(50, 12), (100, 16), (0, 0)])
async def test_of_a_large_pool_some_are_looked_at_on_both_sides(here: int, own: int) -> None:
    replicas = [Replica(number, HERE if number < here else THERE, 0) for number in range(100)]
    (candidates,) = await router(*replicas).choose_replicas(replicas, None)
    assert [each.node_id for each in candidates] == [HERE] * own + [THERE] * (16 - own)
    assert len({each.replica_id for each in candidates}) == 16


def test_serve_sends_it() -> None:
    config = RequestRouterConfig(request_router_class=LeastBusy)
    sent = pickle.loads(pickle.dumps(config._serialized_request_router_cls))
    assert cloudpickle.loads(sent).__name__ == "LeastBusy"
