import numpy as np
import pytest

from deployments.errors import InvalidRequest
from deployments.protocol import FinishReason, FrameChunk
from deployments.talker.process import channel
from tests.deployments.talker.driving import ask

FRAMES = np.arange(32, dtype=np.int16).reshape(2, 16)
MESSAGES: list[channel.Command | channel.EngineEvent] = [
    channel.Loading("the talker"), channel.Submit(1, ask("Hello there." * 50)),
    channel.Produced(((1, FrameChunk(FRAMES, 5, FinishReason.STOP)),), 0.01, channel.EngineLoad(num_running=1)),
    channel.RequestFailed(2, InvalidRequest("too long", "input")), channel.Abort(1),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 100, 10**6])
def test_messages_survive_any_cut(size: int) -> None:
    data = b"".join(channel.encode(message) for message in MESSAGES)
    unpacker = channel.Unpacker()
    received = [message for start in range(0, len(data), size) for message in unpacker.feed(data[start : start + size])]
    assert [channel.encode(message) for message in received] == [channel.encode(message) for message in MESSAGES]
    assert received[0] == MESSAGES[0]
