"""Calls to other deployments: routing, translation of Ray's exceptions, and cancellation of abandoned streams."""

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

_finished: defaultdict[str, Rate] = defaultdict(Rate)  # rate at which streams end in this process, by deployment
# A call that no replica accepts within this time is repeated, because it may be waiting for a hung replica.
_ACCEPT_S = 4.0
# A stream that delivers neither chunks nor heartbeats for this long is lost. A replica that hangs or loses its network
# does not close its connections.
_PEER_TIMEOUT_S = 3.0
_CATCH_UP_S = 0.25  # for reading messages that arrived while this process could not run
# Maximum number of replicas to query for their queue length, in total and on the caller's node. Answers are valid for
# ten seconds, so each call in a large pool would otherwise query many replicas.
_MOST = 16
_MOST_OWN = 12
_cancelling: set[asyncio.Task[None]] = set()  # pending cancellations of calls that no replica had accepted yet

T = TypeVar("T")


async def stream_from_replica(
    handle: DeploymentHandle, method: str, request: object, *, lost: type[ReplicaLost]
) -> AsyncGenerator[Any, None]:
    """Yield the items of a streaming method. Closing the generator cancels the call.

    Raises the method's error. Raises Overloaded or NotReady if no replica accepts the call, `lost` if the replica died
    or sends no heartbeats (`Replica.with_heartbeats`), and Moved if Serve cancelled the call. Serve cancels a call if
    another call of the same HTTP request is cancelled.
    """
    response = handle.options(method_name=method, stream=True).remote(request)
    items = ItemReader(aiter(response))
    is_taken = False  # whether a replica has accepted the call
    try:
        while True:
            within_s = _PEER_TIMEOUT_S if is_taken else _ACCEPT_S
            if not (await items.wait(within_s) or await items.wait(_CATCH_UP_S)):
                raise lost(f"the replica has been silent for {within_s:.0f} s")
            try:
                item = items.get_nowait()
            except StopAsyncIteration:
                _finished[handle.deployment_name].count(time.monotonic())
                return
            except asyncio.CancelledError:  # raised by Serve; a cancellation of this task interrupts the wait above
                raise Moved("Serve has cancelled the call") from None
            is_taken = True
            yield item
    except Exception as error:
        response.cancel()
        raise from_ray_error(error, lost, _finished[handle.deployment_name]) from error
    finally:
        if is_taken or items.is_ready:
            response.cancel()
            await items.aclose()
        else:
            cancelling = asyncio.create_task(_cancel_once_taken(response, items))
            _cancelling.add(cancelling)
            cancelling.add_done_callback(_cancelling.discard)


async def _cancel_once_taken(response: Any, items: "ItemReader[Any]") -> None:
    """Cancel a call after a replica has accepted it, because Serve may lose an earlier cancellation."""
    await items.wait(_ACCEPT_S)
    response.cancel()
    await items.aclose()


class ItemReader(Generic[T]):
    """Reads an async iterator with a timeout for each item.

    One task reads all items, because a separate task and wait for each item would take three times as long.
    """

    def __init__(self, items: AsyncIterator[T]) -> None:
        self._loop = asyncio.get_running_loop()
        self._item: list[T] = []  # at most one
        self._taken: asyncio.Future[None] | None = None  # the task waits for this future after each item
        self._coming: asyncio.Future[None] | None = None  # the reader waits for this future
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
    def is_ready(self) -> bool:
        """Whether `get_nowait` would immediately return an item or report the end."""
        return bool(self._item) or self._task.done()

    async def wait(self, within_s: float) -> bool:
        """Wait up to `within_s` for the next item or the end. Returns whether `get_nowait` is ready.

        Only this call makes the iterator produce the item after the last taken item.
        """
        if not self._item and self._taken is not None and not self._taken.done():
            self._taken.set_result(None)
        if not self.is_ready:
            self._coming = self._loop.create_future()
            timer = self._loop.call_later(within_s, self._wake)
            try:
                await self._coming
            finally:
                timer.cancel()
        return self.is_ready

    def get_nowait(self) -> T:
        """Return the next item. Raises StopAsyncIteration at the end, and any exception from the iterator."""
        if self._item:
            return self._item.pop()
        self._task.result()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop reading and discard the task's result.

        An exception's traceback would otherwise keep the reader and its request, which may be megabytes, alive.
        """
        task = self._task
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()
        del self._task


async def call_replica(handle: DeploymentHandle, method: str, *arguments: object, lost: type[ReplicaLost]) -> Any:
    """Return the result of a method call. Raises the same errors as `stream_from_replica`."""
    try:
        return await handle.options(method_name=method).remote(*arguments)
    except asyncio.CancelledError:
        asking = asyncio.current_task()
        if asking is not None and asking.cancelling():
            raise
        raise Moved("Serve has cancelled the call") from None
    except Exception as error:
        raise from_ray_error(error, lost, _finished[handle.deployment_name]) from error


async def call_all_replicas(handle: DeploymentHandle, method: str, argument: object) -> list[Any]:
    """Return the results of a method from all running replicas. Raises NotReady if one does not respond in time."""
    try:
        results: list[Any] = await handle.broadcast(method, argument).results_async(timeout_s=_PEER_TIMEOUT_S)
    except (TimeoutError, RayActorError, RayTaskError, RpcError, DeploymentUnavailableError) as error:
        raise NotReady(f"{handle.deployment_name}: not every replica has answered {method}: {error!r}") from error
    return results


def from_ray_error(error: Exception, lost: type[ReplicaLost], finished: Rate) -> Exception:
    """Convert an exception from Ray to Talkray's error. An error raised by the method itself is returned unchanged."""
    if isinstance(error, BackPressureError):
        queued = error.args[0]  # calls from this process waiting for a replica with capacity
        after_s = finished.retry_after_s(queued, time.monotonic())
        full = f"Every replica is at its limit ({queued} requests wait). More replicas raise the limit."
        return Overloaded(full, after_s)
    if isinstance(error, RayActorError | RpcError):
        return lost(f"the replica that served this stream died: {type(error).__name__}")
    if isinstance(error, DeploymentUnavailableError):
        return NotReady("the next stage has no replica yet")
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return error


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
