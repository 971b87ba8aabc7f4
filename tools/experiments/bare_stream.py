"""What of the time to the first byte is Ray Serve's own: streams through two and three deployments that do nothing.

    python -m tools.experiments.bare_stream [--requests 30] [--port 8077]

One request a second, with the settings that `talkray serve` applies. `two`: ingress and talker, as with
`codec.placement: inline`. `three`: a codec replica between them. Clocks are those of one host.
"""

import argparse
import asyncio
import http.client
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

from serve_app.cli import ray_settings

_PERIOD_S = 1.0
_FRAME_S, _LATER_FRAMES = 0.08, 5
# Settings by which Serve's processes run code of ours.
_OUR_CODE = ("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH")
_WARM_UP = 3  # requests that are not counted
# Each stage ends when the request, or its first item, has reached ...
STAGES = ("the ingress", "the talker", "the ingress again", "the client")


class BareTalker:
    """Sends one item at once, and others at the pace of audio."""

    async def generate(self, request: object) -> AsyncIterator[tuple[float, float]]:
        """When the request came and when the item left, in seconds since the epoch."""
        came_s = time.time()
        yield came_s, time.time()
        for _ in range(_LATER_FRAMES):
            await asyncio.sleep(_FRAME_S)
            yield came_s, time.time()


class BareCodec:
    """Hands on what its talker sends."""

    def __init__(self, talker: Any) -> None:
        self._talker = talker

    async def generate(self, request: object) -> AsyncIterator[tuple[float, float]]:
        """The talker's items."""
        async for item in self._talker.options(method_name="generate", stream=True).remote(request):
            yield item


class BareIngress:
    """Answers with the times of the first item in one line, and a byte for each later one."""

    def __init__(self, talker: Any, codec: Any) -> None:
        self._handles = {"/two": talker, "/three": codec}

    async def __call__(self, request: Request) -> StreamingResponse:
        """`/two` or `/three` deployments."""
        came_s = time.time()
        handle = self._handles[request.url.path]
        items = aiter(handle.options(method_name="generate", stream=True).remote("a request"))
        at_talker_s, left_s = await anext(items)
        back_s = time.time()

        async def body() -> AsyncIterator[str]:
            yield json.dumps([came_s, at_talker_s, left_s, back_s]) + "\n"
            async for _ in items:
                yield "."

        return StreamingResponse(body())


@contextmanager
def deployed(port: int) -> Iterator[None]:
    """Ray and the three deployments on this machine."""
    ray_settings.apply_local()
    for name in _OUR_CODE:
        del os.environ[name]
    import ray  # after the settings
    from ray import serve

    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="warning")
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    options: dict[str, Any] = {"max_ongoing_requests": 100, "ray_actor_options": {"num_cpus": 0.1}}
    talker = serve.deployment(name="Talker", **options)(BareTalker).bind()
    codec = serve.deployment(name="Codec", **options)(BareCodec).bind(talker)
    ingress = serve.deployment(name="Ingress", num_replicas=2, **options)(BareIngress).bind(talker, codec)
    serve.run(ingress, name="bare", route_prefix="/")
    try:
        yield
    finally:
        serve.shutdown()  # ends HAProxy too
        ray.shutdown()


def ask(port: int, path: str) -> Sequence[float]:
    """Milliseconds of each stage of one request; the last one is all of it."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.connect()
    sent_s = time.time()
    connection.request("GET", path)
    answer = connection.getresponse()
    came_s, at_talker_s, left_s, back_s = json.loads(answer.readline())
    got_s = time.time()
    answer.read()
    stages = (came_s - sent_s, at_talker_s - came_s, back_s - left_s, got_s - back_s, got_s - sent_s)
    return [1000 * stage for stage in stages]


def measured(port: int, path: str, requests: int) -> list[Sequence[float]]:
    """The stages of each request, one a second."""
    rows = []
    for number in range(requests + _WARM_UP):
        due_s = time.monotonic() + _PERIOD_S
        row = ask(port, path)
        if number >= _WARM_UP:
            rows.append(row)
        time.sleep(max(0.0, due_s - time.monotonic()))
    return rows


def table(rows: Sequence[Sequence[float]]) -> Iterator[str]:
    """p50 and p95 of each stage."""
    for name, values in zip((*STAGES, "all"), zip(*rows, strict=True), strict=True):
        yield f"  {name:20} {statistics.median(values):6.2f} / {statistics.quantiles(values, n=20)[-1]:6.2f}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.experiments.bare_stream")
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--port", type=int, default=8077)
    options = parser.parse_args()
    with deployed(options.port):
        for path in ("/two", "/three"):
            print(f"{path[1:]} deployments, {options.requests} requests, until ..., p50 / p95 in ms", flush=True)
            print("\n".join(table(measured(options.port, path, options.requests))), flush=True)


if __name__ == "__main__":
    main()
