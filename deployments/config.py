"""Settings of the two pools. `serve_app.config.AppConfig` holds them and reads them once from YAML."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]


class Strict(BaseModel):
    """Frozen settings in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TalkerConfig(Strict):
    """The talker engine of one replica."""

    device: Device = "auto"  # auto: cuda where the replica was given a GPU, else cpu
    dtype: DType = "auto"  # auto: bfloat16 on cuda, float32 on cpu
    threads: Annotated[int, Field(ge=1)] = 1  # torch threads of the engine process
    max_num_seqs: Annotated[int, Field(ge=1)] = 8  # sequences in one batch; on CPU also the fixed number of rows
    max_num_waiting: Annotated[int, Field(ge=0)] = 16  # sequences that may wait behind them
    max_model_len: Annotated[int, Field(ge=64)] = 4096  # rows of one sequence: prompt and frames
    kv_block_size: Annotated[int, Field(ge=1)] = 16
    kv_cache_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    runaway_frames_per_token: Annotated[int, Field(ge=1)] = 12
    runaway_min_frames: Annotated[int, Field(ge=1)] = 75


class CodecConfig(Strict):
    """The codec decoder of one replica."""

    device: Device = "cpu"
    dtype: DType = "auto"  # auto: float32
    workers: Annotated[int, Field(ge=1)] = 1  # decoder threads of a replica, one torch thread each
    max_batch_size: Annotated[int, Field(ge=1)] = 16
    # Streams begin while a replica needs less than this share of its workers to decode them in real time, as measured.
    max_use: Annotated[float, Field(gt=0)] = 0.9
    # Frames of a stream's first, second, ... chunk at most; the last repeats.
    chunk_frames: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (1, 2, 4, 8, 12)
