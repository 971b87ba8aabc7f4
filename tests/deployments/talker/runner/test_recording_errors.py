from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from deployments.errors import InvalidRequest
from deployments.protocol import Reference
from deployments.talker.runner.recording_encoder import RecordingEncoder


@pytest.mark.parametrize(("error", "raised", "message"), [
    (torch.OutOfMemoryError("CUDA out of memory"), InvalidRequest, "too little free memory to encode ref_audio"),
    (RuntimeError("CUDA error: an illegal memory access"), RuntimeError, "illegal memory access"),
])  # fmt: skip
def test_only_a_lack_of_memory_is_due_to_the_recording(
    error: Exception, raised: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Mock())
    speaker = Mock(shape=SimpleNamespace(sample_rate=100))
    encoder = RecordingEncoder(speaker, None, torch.device("cpu"))
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=error))
    with pytest.raises(raised, match=message):
        encoder.start(Reference(np.zeros(100, np.float32)))
