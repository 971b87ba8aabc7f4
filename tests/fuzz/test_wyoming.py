"""Events of Wyoming to its sidecar: as clients send them, in any order, spoiled, and left in the middle."""

import asyncio
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from wyoming.info import Describe

from tests.fuzz.conftest import BOUND_S, Cases
from tests.fuzz.test_dialects import filled
from tests.serve_app.fake import utterance
from tests.tools.test_wyoming import connected

pytestmark = pytest.mark.anyio

EVENTS = (
    {"type": "synthesize-start", "data": {"voice": {"name": "ryan", "speaker": "ryan"}}},
    {"type": "synthesize-chunk", "data": {"text": "TEXT"}},
    {"type": "synthesize", "data": {"text": "TEXT", "voice": {"name": "ryan"}, "text_format": "ssml"}},
    {"type": "synthesize-stop"}, {"type": "ping", "data": {"text": "TEXT"}}, {"type": "describe"},
)  # fmt: skip


def sent(chance: random.Random) -> Iterator[bytes]:
    in_order = chance.random() < 0.5
    for number in range(chance.randint(1, 6)):
        event = filled(EVENTS[number % len(EVENTS)] if in_order else chance.choice(EVENTS), chance)
        if isinstance(event, dict) and chance.random() < 0.3:
            data = json.dumps(event.pop("data", {})).encode()
            length = len(data) + chance.choice((0, 0, 0, -1, 5))
            yield json.dumps({**event, "data_length": length}).encode() + b"\n" + data
        elif chance.random() < 0.03:
            yield chance.randbytes(chance.randint(0, 40)) + b"\n"
        else:
            yield json.dumps(event).encode() + b"\n"


async def test_events(cases: Cases, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The sidecar answers or closes; nothing is raised, and when the clients have left nothing speaks any more."""
    caplog.set_level(logging.CRITICAL, "talkray_tools.wyoming")
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    async with connected(list(utterance(1)), tmp_path) as client:
        before = asyncio.all_tasks()
        for chance in cases:
            cases.count(await _talk(client.port, chance))
            assert not raised, raised
        async with asyncio.timeout(BOUND_S):
            await client.write_event(Describe().event())
            event = await client.read_event()
            assert event is not None
            assert event.type == "info"
            while left := asyncio.all_tasks() - before:
                await asyncio.wait(left)
    assert not raised, raised


async def _talk(port: int, chance: random.Random) -> str:
    """Sends some events, and reads until the sidecar has nothing more to say, or leaves before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in sent(chance):
            writer.write(part)
        if chance.random() < 0.3:
            return "left"
        writer.write_eof()
        async with asyncio.timeout(BOUND_S):
            answered = await reader.read()
        return "answered" if answered else "closed"
    except ConnectionError:
        return "closed"
    finally:
        writer.close()
