"""Calling another deployment: the one place that knows what Ray raises and that a left stream must be cancelled."""

import time
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.errors import NotReady, Overloaded, ReplicaLost
from deployments.rate import Rate

# Streams that this process has seen end: each deployment calls one other.
_finished = Rate()


async def stream(
    handle: DeploymentHandle, method: str, request: object, *, lost: type[ReplicaLost]
) -> AsyncGenerator[Any, None]:
    """The items of a streaming method. Leaving the generator, for whatever reason, cancels the call behind it.

    Raises what the method raised, Overloaded where no replica takes the call, `lost` where the replica died.
    """
    response = handle.options(method_name=method, stream=True).remote(request)
    try:
        async for item in response:
            yield item
        _finished.count(time.monotonic())
    except Exception as error:
        raise translate(error, lost) from error
    finally:
        response.cancel()


async def call(handle: DeploymentHandle, method: str, *, lost: type[ReplicaLost]) -> Any:
    """The result of a plain method without arguments; raises as `stream` does."""
    try:
        return await handle.options(method_name=method).remote()
    except Exception as error:
        raise translate(error, lost) from error


def translate(error: Exception, lost: type[ReplicaLost]) -> Exception:
    """Ray's exception as one of ours; an exception that the method raised is returned as it was raised there."""
    if isinstance(error, BackPressureError):
        queued = error.args[0]  # calls of this process that wait for a replica with room
        after_s = _finished.retry_after_s(queued, time.monotonic())
        return Overloaded(f"every replica of the next stage is full and {queued} requests wait", after_s)
    if isinstance(error, RayActorError):
        return lost(f"the replica serving this stream is gone: {type(error).__name__}")
    if isinstance(error, DeploymentUnavailableError):
        return NotReady("the next stage has no replica yet")
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return error
