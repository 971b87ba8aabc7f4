"""A whole application in which a request costs milliseconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from deployments.config import TalkerConfig
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.state.kv_cache import KVCache
from serve_app.config import AdmissionSettings, ApiSettings, AppConfig
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES
from tools.suites.application import running

AT_ONCE = 8
# Short, so that a case takes milliseconds; long texts do not fit, which they have to be told before a byte is sent.
MAX_MODEL_LEN = 256
BLOCK = 16  # positions of a KV block on a CPU
FEW_FRAMES = 3
PATIENT = AdmissionSettings(max_line_s=1000, max_late_s=1000, max_wait_s=1000)  # overload has tests of its own


@contextmanager
def tiny_server(directory: Path) -> Iterator[str]:
    """Its base URL. Its KV cache holds one utterance of the greatest length and not a block more: a block that leaks
    is missed.
    """
    model = directory / "tiny"
    write_checkpoint(model, SHAPES["tiny-CustomVoice"], Options(dtype=torch.float32))
    block = BLOCK * KVCache.bytes_per_position(ModelConfig.load(model).talker, torch.float32)
    talker = TalkerConfig(
        max_num_seqs=AT_ONCE, max_num_waiting=2 * AT_ONCE, max_model_len=MAX_MODEL_LEN,
        kv_cache_bytes=block * (MAX_MODEL_LEN // BLOCK + 1),  # one is nobody's
    )  # fmt: skip
    app = AppConfig(model=str(model), talker=talker, api=ApiSettings(admission=PATIENT))
    with running(app) as url:
        yield url
