"""What the API may ask the node that it runs on."""

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import APIRouter, Response
from starlette.concurrency import run_in_threadpool

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster, seen from the ingress replica on it."""

    is_running: Callable[[], bool]  # whether any talker replica takes requests
    scrape: Callable[[], bytes]  # all metrics of this node's processes, in Prometheus' text format; blocks


def metrics_routes(node: Node) -> APIRouter:
    """`GET /metrics`, for a single machine: on a cluster, Prometheus scrapes the agent of every node itself."""
    router = APIRouter()

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """What the node's metrics agent exports."""
        return Response(await run_in_threadpool(node.scrape), media_type=_CONTENT_TYPE)

    return router
