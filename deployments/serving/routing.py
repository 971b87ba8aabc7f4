"""A call goes to the replica with the fewest calls, and among equals to a replica on the caller's node."""

import random

from ray.serve.request_router import FIFOMixin, LocalityMixin, PendingRequest, RequestRouter, RunningReplica

# How many replicas are asked for their number of calls, and how many of them may be on the caller's node. Answers are
# ten seconds valid, so in a large pool each call would ask many replicas anew.
_MOST = 16
_MOST_OWN = 12


class LeastBusy(FIFOMixin, LocalityMixin, RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Takes the replica with the fewest calls. Serve's own router takes the better of two random ones.

    Two random replicas are often both busy while others are idle, and a first frame that waits is late. A request that
    is made again may go to any node, because the replica on this one may hang. Serve sends this class by value.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One list, of which Serve takes the replica with the shortest queue."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # Serve asks again and again while all are full
        if _was_asked_for(pending_request):
            return [_some(candidate_replicas, _MOST)]
        own, zone, elsewhere = self.rank_replicas_via_locality(candidate_replicas)
        on_other_nodes = zone + elsewhere
        near = _some(own, _MOST_OWN if on_other_nodes else _MOST)
        return [near + _some(on_other_nodes, _MOST - len(near))]


def _some(replicas: list[RunningReplica], most: int) -> list[RunningReplica]:
    return random.sample(replicas, min(most, len(replicas)))


def _was_asked_for(pending_request: PendingRequest | None) -> bool:
    if pending_request is None or not pending_request.args:
        return False
    return getattr(pending_request.args[0], "was_asked_for", False)
