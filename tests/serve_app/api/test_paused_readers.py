"""Clients on real sockets that take nothing for a while: the call behind their stream is left, and goes on later."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments import listener
from serve_app.api.early_status import EarlyStatusProtocol
from serve_app.speech.replica_synthesizer import ReplicaSynthesizer
from tests.serve_app.extensions.test_interruptions import serving
from tests.serve_app.fake import CUSTOM_VOICE
from tests.serve_app.speech.test_replica_synthesizer import Codec
from tools.suites.listening import one_deployed

pytestmark = pytest.mark.anyio

NUM_CHUNKS, CHUNK_BYTES = 250, 200_000  # more than all buffers on the way hold
REQUEST = b'{"input": "Hello", "voice": "ryan", "response_format": "pcm", "seed": 7}'
HEAD = b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
BOUND_S = 30.0


@pytest.fixture
def codec(monkeypatch: pytest.MonkeyPatch) -> Codec:
    monkeypatch.setattr(listener, "UNREAD_S", 0.2)
    return Codec(NUM_CHUNKS, chunk_bytes=CHUNK_BYTES)


@pytest.fixture
async def port(codec: Codec) -> AsyncIterator[int]:
    synthesizer = ReplicaSynthesizer(one_deployed(codec))
    synthesizer._info = CUSTOM_VOICE
    async with serving(synthesizer, http=EarlyStatusProtocol) as url:
        yield int(url.rpartition(":")[2])


async def test_a_paused_client_hears_everything_once(codec: Codec, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    was_left = asyncio.Event()
    monkeypatch.setattr(codec, "cancel", was_left.set)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
    writer.write(HEAD % len(REQUEST) + REQUEST)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    await asyncio.wait_for(was_left.wait(), BOUND_S)  # and meanwhile nothing is read
    assert len(codec.requests) == 1
    monkeypatch.setattr(listener, "UNREAD_S", BOUND_S)
    while (await reader.readline()) != b"\r\n":
        pass
    heard = bytearray()
    while size := int(await reader.readline(), 16):
        heard += (await reader.readexactly(size + 2))[:-2]
    writer.close()
    assert bytes(heard) == b"".join(bytes([number]) * CHUNK_BYTES for number in range(NUM_CHUNKS))
    [_, again] = codec.requests
    assert again.resume is not None
    assert 0 < len(again.resume.codes) < NUM_CHUNKS
