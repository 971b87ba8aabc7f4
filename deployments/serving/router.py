"""Choice of the replica that a call goes to."""

import random

from ray.serve.request_router import FIFOMixin, LocalityMixin, PendingRequest, RequestRouter, RunningReplica

# Maximum number of replicas to query for their queue length, in total and on the caller's node. Answers are valid for
# ten seconds, so each call in a large pool would otherwise query many replicas.
_MOST = 16
_MOST_OWN = 12


class LeastBusy(FIFOMixin, LocalityMixin, RequestRouter):  # type: ignore[misc]  # Ray has no type annotations
    """Request router that selects the replica with the fewest ongoing calls.

    Serve's own router compares two random replicas. Both replicas are often busy while others are idle, which delays
    the first frame. A retry may go to any node, because the replica on the caller's node may be hung. Serve sends
    this class by value.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return one list of candidates. Serve selects the candidate with the shortest queue."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # else Serve polls without pausing while all are full
        if _is_retry(pending_request):
            return [_some(candidate_replicas, _MOST)]
        own, zone, elsewhere = self.rank_replicas_via_locality(candidate_replicas)
        on_other_nodes = zone + elsewhere
        near = _some(own, _MOST_OWN if on_other_nodes else _MOST)
        return [near + _some(on_other_nodes, _MOST - len(near))]


def _some(replicas: list[RunningReplica], most: int) -> list[RunningReplica]:
    return random.sample(replicas, min(most, len(replicas)))


def _is_retry(pending_request: PendingRequest | None) -> bool:
    if pending_request is None or not pending_request.args:
        return False
    return getattr(pending_request.args[0], "is_retry", False)
