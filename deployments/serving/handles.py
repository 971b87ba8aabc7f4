"""Asking another deployment: the one place that knows Ray's exceptions and cancels a stream that is left."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from grpc import RpcError
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.errors import Moved, NotReady, Overloaded, ReplicaLost
from deployments.limits import Rate

_finished = Rate()  # of the streams that ended in this process, which calls one other deployment
# A call that no replica takes for so long is made again, because it may wait for a replica that hangs.
_ACCEPT_S = 4.0
# A stream without a chunk or a heartbeat for so long is lost, because a replica that hangs, or whose host is cut off,
# closes no connection.
_PEER_TIMEOUT_S = 3.0
_CATCH_UP_S = 0.25  # for messages that came while this process could not run
_left: set[asyncio.Task[None]] = set()  # calls that were left before a replica had taken them


async def read_replica(
    handle: DeploymentHandle, method: str, request: object, *, lost: type[ReplicaLost]
) -> AsyncGenerator[Any, None]:
    """The items of a streaming method. Leaving the generator cancels the call.

    Raises the method's error; Overloaded or NotReady if no replica takes the call; `lost` if the replica died or
    sends not even the heartbeats of `Replica.stream`; Moved if Serve cancelled the call. Serve does so if another
    call of the same HTTP request is left.
    """
    response = handle.options(method_name=method, stream=True).remote(request)
    items = aiter(response)
    is_taken = False  # by a replica
    coming: asyncio.Future[Any] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(items))
            within_s = _PEER_TIMEOUT_S if is_taken else _ACCEPT_S
            if not await _settles(coming, within_s):
                raise lost(f"the replica has been silent for {within_s:.0f} s")
            try:
                item = coming.result()
            except StopAsyncIteration:
                _finished.count(time.monotonic())
                return
            except asyncio.CancelledError:  # Serve's: a cancellation of this task is raised by the wait above
                raise Moved("Serve has cancelled the call") from None
            is_taken = True
            yield item
    except Exception as error:
        response.cancel()
        raise from_ray_error(error, lost) from error
    finally:
        if coming is None or coming.done() or is_taken:
            response.cancel()
            await drop(coming)
        else:
            leaving = asyncio.create_task(_leave(response, coming))
            _left.add(leaving)
            leaving.add_done_callback(_left.discard)
        coming = None  # its exception's traceback holds this frame, and with it the request, which may be megabytes


async def _leave(response: Any, coming: asyncio.Future[Any]) -> None:
    """Cancel a call once a replica has taken it, because Serve may lose a cancellation that comes before."""
    await asyncio.wait((coming,), timeout=_ACCEPT_S)
    response.cancel()
    await drop(coming)


async def _settles(coming: asyncio.Future[Any], within_s: float) -> bool:
    for timeout_s in (within_s, _CATCH_UP_S):
        await asyncio.wait((coming,), timeout=timeout_s)
        if coming.done():
            return True
    return False


async def ask_replica(handle: DeploymentHandle, method: str, *arguments: object, lost: type[ReplicaLost]) -> Any:
    """The result of a method. Raises as `read_replica` does."""
    try:
        return await handle.options(method_name=method).remote(*arguments)
    except Exception as error:
        raise from_ray_error(error, lost) from error


async def ask_all_replicas(handle: DeploymentHandle, method: str, argument: object) -> list[Any]:
    """The results of a method on every running replica. Raises NotReady if a replica does not answer in time."""
    try:
        results: list[Any] = await handle.broadcast(method, argument).results_async(timeout_s=_PEER_TIMEOUT_S)
    except (TimeoutError, RayActorError, RayTaskError, RpcError, DeploymentUnavailableError) as error:
        raise NotReady(f"{handle.deployment_name}: not every replica has answered {method}: {error!r}") from error
    return results


async def drop(coming: asyncio.Future[Any] | None) -> None:
    """End a task and drop its outcome."""
    if coming is None:
        return
    coming.cancel()
    await asyncio.wait((coming,))
    if not coming.cancelled():
        coming.exception()


def from_ray_error(error: Exception, lost: type[ReplicaLost]) -> Exception:
    """Our error for an exception of Ray's. An error that the method raised is returned as it was raised there."""
    if isinstance(error, BackPressureError):
        queued = error.args[0]  # calls of this process that wait for a replica with room
        after_s = _finished.retry_after_s(queued, time.monotonic())
        full = f"Every replica is full (waiting for one with room: {queued}); more replicas raise the limit."
        return Overloaded(full, after_s)
    if isinstance(error, RayActorError | RpcError):
        return lost(f"the replica serving this stream is gone: {type(error).__name__}")
    if isinstance(error, DeploymentUnavailableError):
        return NotReady("the next stage has no replica yet")
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return error
