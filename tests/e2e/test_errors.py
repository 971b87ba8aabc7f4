"""Errors from every stage arrive as statuses, whole."""

import asyncio
import json

import aiohttp
import pytest

from deployments.protocol import SynthesisRequest
from tests.e2e.conftest import TALKER
from tests.e2e.speech import PATH, Pools, body, fetch
from tools.suites.processes import marked, read_logs
from tools.suites.raw import BOUND_S, connected, read_to_end

pytestmark = pytest.mark.anyio

CAPACITY = TALKER.max_num_seqs + TALKER.max_num_waiting


async def test_a_refusal_of_the_talker(pools: Pools) -> None:
    """Only the talker counts tokens. Over HTTP the embedded voice gets segments, which always fit."""
    long = SynthesisRequest("long", "é" * 4000, voice="nora", non_streaming_mode=True)
    assert await pools.refusal(long) == ("input", "context_length_exceeded")


def test_a_path_without_its_slash(server: str) -> None:
    """No route can have it: that is the request's fault, not that of a replica that was not found."""
    with connected(int(server.rpartition(":")[2])) as raw:
        raw.sendall(b"GET health HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        head, _, content = read_to_end(raw, BOUND_S).partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert json.loads(content)["error"]["code"] == "invalid_path"


@pytest.mark.parametrize("path", ["/v1/nothing", f"{PATH}/ws/", "/"])
async def test_unknown_socket(http: aiohttp.ClientSession, path: str) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await http.ws_connect(path)
    assert refused.value.status == 404


async def test_a_burst_is_served_or_refused(http: aiohttp.ClientSession, pools: Pools, run_id: str) -> None:
    async def ask() -> tuple[int, str | None, bytes]:
        async with http.post(PATH, json=body(ignore_eos=True, max_new_tokens=41)) as answer:
            return answer.status, answer.headers.get("retry-after"), await answer.read()

    answers = await asyncio.gather(*(ask() for _ in range(2 * CAPACITY)))
    served = [len(content) for status, _, content in answers if status == 200]
    refused = [(retry_after, content) for status, retry_after, content in answers if status == 429]
    assert len(served) + len(refused) == len(answers)
    assert len(served) >= CAPACITY
    assert len(refused) > 0
    assert all(size > 0 for size in served)
    assert all(retry_after is not None and int(retry_after) >= 1 for retry_after, _ in refused)
    assert any(b"The talker is at its limit" in content for _, content in refused), "the talker has refused some"
    await pools.reach(running=0)
    assert await fetch(http, body(max_new_tokens=5))
    logs = read_logs(marked(run_id))
    assert [str(file) for file, content in logs.items() if b"Overloaded: " in content] == []
