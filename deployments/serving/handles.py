"""Calls to another deployment: the choice of a replica, Ray's exceptions, and the end of abandoned streams."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Generic, TypeVar

from grpc import RpcError
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import FIFOMixin, LocalityMixin, PendingRequest, RequestRouter, RunningReplica

from deployments.errors import Moved, NotReady, Overloaded, ReplicaLost
from deployments.limits import Rate

_finished: defaultdict[str, Rate] = defaultdict(Rate)  # of streams that ended in this process, by deployment
# After this time a call that no replica took is made again, because it may wait for a replica that hangs.
_ACCEPT_S = 4.0
# After this time without a chunk or heartbeat a stream is lost, because a replica that hangs, or whose host is cut off,
# closes no connection.
_PEER_TIMEOUT_S = 3.0
_CATCH_UP_S = 0.25  # for messages that came while this process could not run
# How many replicas are asked for their number of calls, and how many of them may be on the caller's node. Answers are
# ten seconds valid, so in a large pool each call would ask many replicas anew.
_MOST = 16
_MOST_OWN = 12
_cancelling: set[asyncio.Task[None]] = set()  # of calls that were closed before a replica had taken them

T = TypeVar("T")


async def read_replica(
    handle: DeploymentHandle, method: str, request: object, *, lost: type[ReplicaLost]
) -> AsyncGenerator[Any, None]:
    """The items of a streaming method. Closing the generator cancels the call.

    Raises the method's error; Overloaded or NotReady if no replica takes the call; `lost` if the replica died or
    sends not even heartbeats (`Replica.with_heartbeats`); Moved if Serve cancelled the call. Serve does so if another
    call of the same HTTP request is cancelled.
    """
    response = handle.options(method_name=method, stream=True).remote(request)
    items = ItemReader(aiter(response))
    is_taken = False  # by a replica
    try:
        while True:
            within_s = _PEER_TIMEOUT_S if is_taken else _ACCEPT_S
            if not (await items.wait(within_s) or await items.wait(_CATCH_UP_S)):
                raise lost(f"the replica has been silent for {within_s:.0f} s")
            try:
                item = items.take()
            except StopAsyncIteration:
                _finished[handle.deployment_name].count(time.monotonic())
                return
            except asyncio.CancelledError:  # Serve's: a cancellation of this task is raised by the wait above
                raise Moved("Serve has cancelled the call") from None
            is_taken = True
            yield item
    except Exception as error:
        response.cancel()
        raise from_ray_error(error, lost, _finished[handle.deployment_name]) from error
    finally:
        if is_taken or items.has_come:
            response.cancel()
            await items.drop()
        else:
            cancelling = asyncio.create_task(_cancel_once_taken(response, items))
            _cancelling.add(cancelling)
            cancelling.add_done_callback(_cancelling.discard)


async def _cancel_once_taken(response: Any, items: "ItemReader[Any]") -> None:
    """Cancel a call once a replica has taken it, because Serve may lose a cancellation that comes before."""
    await items.wait(_ACCEPT_S)
    response.cancel()
    await items.drop()


class ItemReader(Generic[T]):
    """Reads an iterator one item at a time, and detects when none comes. One task reads all items: a task and a wait
    for each item take three times as long.
    """

    def __init__(self, items: AsyncIterator[T]) -> None:
        self._loop = asyncio.get_running_loop()
        self._item: list[T] = []  # at most one
        self._taken: asyncio.Future[None] | None = None  # the task waits for it behind each item
        self._coming: asyncio.Future[None] | None = None  # the reader waits for it
        self._task = self._loop.create_task(self._read(items))
        self._task.add_done_callback(self._wake)

    async def _read(self, items: AsyncIterator[T]) -> None:
        async for item in items:
            self._item.append(item)
            self._taken = self._loop.create_future()
            self._wake()
            await self._taken

    def _wake(self, *_: object) -> None:
        if self._coming is not None and not self._coming.done():
            self._coming.set_result(None)

    @property
    def has_come(self) -> bool:
        """Whether `take` would return an item or report the end."""
        return bool(self._item) or self._task.done()

    async def wait(self, within_s: float) -> bool:
        """Wait for the next item or the end, at most `within_s`. The iterator is asked for the item after the latest
        taken one only now.
        """
        if not self._item and self._taken is not None and not self._taken.done():
            self._taken.set_result(None)
        if not self.has_come:
            self._coming = self._loop.create_future()
            timer = self._loop.call_later(within_s, self._wake)
            try:
                await self._coming
            finally:
                timer.cancel()
        return self.has_come

    def take(self) -> T:
        """The item that has come. Raises StopAsyncIteration at the end, and what the iterator raises."""
        if self._item:
            return self._item.pop()
        self._task.result()
        raise StopAsyncIteration

    async def drop(self) -> None:
        """End the reading and drop its outcome: the traceback of an exception holds its reader, and with it a request,
        which may be megabytes.
        """
        task = self._task
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()
        del self._task


async def ask_replica(handle: DeploymentHandle, method: str, *arguments: object, lost: type[ReplicaLost]) -> Any:
    """The result of a method. Raises as `read_replica` does."""
    try:
        return await handle.options(method_name=method).remote(*arguments)
    except asyncio.CancelledError:
        asking = asyncio.current_task()
        if asking is not None and asking.cancelling():
            raise
        raise Moved("Serve has cancelled the call") from None
    except Exception as error:
        raise from_ray_error(error, lost, _finished[handle.deployment_name]) from error


async def ask_all_replicas(handle: DeploymentHandle, method: str, argument: object) -> list[Any]:
    """The results of a method on every running replica. Raises NotReady if a replica does not answer in time."""
    try:
        results: list[Any] = await handle.broadcast(method, argument).results_async(timeout_s=_PEER_TIMEOUT_S)
    except (TimeoutError, RayActorError, RayTaskError, RpcError, DeploymentUnavailableError) as error:
        raise NotReady(f"{handle.deployment_name}: not every replica has answered {method}: {error!r}") from error
    return results


def from_ray_error(error: Exception, lost: type[ReplicaLost], finished: Rate) -> Exception:
    """Our error for an exception of Ray's. An error that the method raised is returned as it was raised there."""
    if isinstance(error, BackPressureError):
        queued = error.args[0]  # calls of this process that wait for a replica with room
        after_s = finished.retry_after_s(queued, time.monotonic())
        full = f"Every replica is full (waiting for one with room: {queued}); more replicas raise the limit."
        return Overloaded(full, after_s)
    if isinstance(error, RayActorError | RpcError):
        return lost(f"the replica serving this stream is gone: {type(error).__name__}")
    if isinstance(error, DeploymentUnavailableError):
        return NotReady("the next stage has no replica yet")
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return error


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
    return getattr(pending_request.args[0], "is_retry", False)
