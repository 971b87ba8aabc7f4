import numpy as np

from deployments.protocol import FinishReason
from deployments.serving.replica_streams import OutgoingAudio, PendingFrames
from deployments.speech_detection import LeadingSilence

SAMPLES, RATE = 240, 24000


def test_what_is_held_back_as_quiet_is_not_delivered() -> None:
    audio = OutgoingAudio(PendingFrames(SAMPLES), LeadingSilence(RATE), position=7)
    codes, levels = np.zeros((1, 2), np.int16), (0, 9000)
    sent = [audio.chunk(codes, np.full(SAMPLES, level, np.int16), None).position for level in levels]
    assert sent == [7, 7 + 2 * SAMPLES]
    assert audio.chunk(codes[:0], np.zeros(0, np.int16), FinishReason.STOP).position == sent[-1]
