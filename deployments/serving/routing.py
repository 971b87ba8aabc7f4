"""A call goes to the replica that has the least to do, and among equals to one on the caller's own node."""

import random

from ray.serve.request_router import FIFOMixin, LocalityMixin, PendingRequest, RequestRouter, RunningReplica

# In a larger pool only so many are asked, replicas of the own node first, because an answer that is ten seconds old
# costs a new call.
_MOST = 16
_MOST_OWN = 12


class LeastBusy(FIFOMixin, LocalityMixin, RequestRouter):  # type: ignore[misc]  # Ray has no types
    """The replica with the fewest calls of all, where Serve's own router takes the better of two at random.

    Of two random replicas of a pool both are often busy while others are not, and a stream that waits for its first
    frame comes late. A node that has more to do than others gives work away. A request that is made again may go
    anywhere: the replica here may be the one that hangs. Serve sends this class by value.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One list: Serve asks the first replica of the ones with the shortest queues."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # Serve asks again and again while all are full
        if _is_made_again(pending_request):
            return [_some(candidate_replicas, _MOST)]
        own, zone, elsewhere = self.rank_replicas_via_locality(candidate_replicas)
        others = zone + elsewhere
        near = _some(own, _MOST_OWN if others else _MOST)
        return [near + _some(others, _MOST - len(near))]


def _some(replicas: list[RunningReplica], most: int) -> list[RunningReplica]:
    return random.sample(replicas, min(most, len(replicas)))


def _is_made_again(pending_request: PendingRequest | None) -> bool:
    if pending_request is None or not pending_request.args:
        return False
    request = pending_request.args[0]
    return getattr(getattr(request, "synthesis", request), "again", False)
