import numpy as np
import pytest

from deployments.errors import InvalidRequest
from deployments.protocol import FinishReason, FrameChunk
from deployments.talker.channel import (
    Abort,
    Command,
    Loading,
    Produced,
    Report,
    RequestFailed,
    Submit,
    Unpacker,
    encode,
)
from tests.deployments.talker.driving import ask

MESSAGES: list[Command | Report] = [
    Loading("the talker"),
    Submit(1, ask("Hello there." * 50)),
    Produced([(1, FrameChunk(np.arange(32, dtype=np.int16).reshape(2, 16), 5, FinishReason.STOP))], 1, 0),
    RequestFailed(2, InvalidRequest("too long", "input")),
    Abort(1),
]


@pytest.mark.parametrize("size", [1, 3, 100, 10**6])
def test_messages_survive_any_cut(size: int) -> None:
    data = b"".join(encode(message) for message in MESSAGES)
    unpacker = Unpacker()
    received = [message for start in range(0, len(data), size) for message in unpacker.feed(data[start : start + size])]
    assert [encode(message) for message in received] == [encode(message) for message in MESSAGES]
    assert received[0] == MESSAGES[0]


def test_a_message_comes_with_its_last_byte() -> None:
    data = encode(Abort(3))
    unpacker = Unpacker()
    assert unpacker.feed(data[:-1]) == []
    assert unpacker.feed(data[-1:]) == [Abort(3)]
    assert unpacker.feed(b"") == []
