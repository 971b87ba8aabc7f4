"""Which replica a call goes to: the one with less to do, and of equals the one on the caller's own node."""

import random

from ray.serve.request_router import FIFOMixin, LocalityMixin, PendingRequest, RequestRouter, RunningReplica


class OwnNodeFirst(FIFOMixin, LocalityMixin, RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Serve's power of two choices among the replicas of this node, with one of another node beside them.

    Serve's own preference fills the replicas of a node up before it looks at others; here a node that has more to do
    than others gives work away. A request that is made again may go anywhere: the replica here may be the one that
    hangs. Serve sends this class by value.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One list: Serve asks the first of it among those whose queues are shortest."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # while all are full, Serve asks again and again
        own, zone, elsewhere = self.rank_replicas_via_locality(candidate_replicas)
        others = zone + elsewhere
        if not own or not others or _is_made_again(pending_request):
            return [_two(candidate_replicas)]
        return [[*_two(own), random.choice(others)]]


def _two(replicas: list[RunningReplica]) -> list[RunningReplica]:
    return random.sample(replicas, min(2, len(replicas)))


def _is_made_again(pending_request: PendingRequest | None) -> bool:
    if pending_request is None or not pending_request.args:
        return False
    request = pending_request.args[0]
    return getattr(getattr(request, "synthesis", request), "again", False)
