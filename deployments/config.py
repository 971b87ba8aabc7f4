"""Settings of the two pools. `serve_app.config.AppConfig` holds them and reads them once from YAML."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Device = Literal["auto", "cpu", "cuda"]
CodecPlacement = Literal["hybrid", "pool", "inline"]
DType = Literal["auto", "float32", "bfloat16", "float16"]


class Strict(BaseModel):
    """Frozen settings in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TalkerConfig(Strict):
    """The talker engine of one replica."""

    device: Device = "auto"  # auto: cuda where the replica was given a GPU, else cpu
    threads: Annotated[int, Field(ge=1)] = 1  # torch threads of the engine process
    max_num_seqs: Annotated[int, Field(ge=1)] = 8  # sequences in one batch
    max_num_waiting: Annotated[int, Field(ge=0)] = 16  # sequences that may wait for a place in the batch
    max_model_len: Annotated[int, Field(ge=64)] = 4096  # rows of one sequence: prompt and frames
    # The share of the GPU's memory that the engine may use, 0.85 by default: keys and values get the rest after
    # weights, codec and captured work, and never more than they can use. `kv_cache_bytes` is their size itself.
    gpu_memory_fraction: Annotated[float | None, Field(gt=0, le=1)] = None
    kv_cache_bytes: Annotated[int | None, Field(ge=1)] = None
    # On a GPU: after so many seconds without a request the engine's memory moves to the host's, and the GPU is free for
    # others (driver 570 or newer). The next request brings it back. Unset: it stays.
    keep_alive_s: Annotated[float | None, Field(gt=0)] = None
    # Attention of the fused kernels. auto: our own, which is faster (docs/performance.md); the start says which it is.
    attention: Literal["auto", "triton", "flash_attn"] = "auto"
    # auto: fused Triton kernels on a GPU in half precision; on a CPU sums that do not depend on the batch.
    kernels: Literal["auto", "plain"] = "auto"
    # True: codes on a GPU do not depend on the batch, because every step runs in the shape of the fullest batch.
    deterministic: bool = False

    @model_validator(mode="after")
    def _sizes_once(self) -> Self:
        if self.gpu_memory_fraction is not None and self.kv_cache_bytes is not None:
            raise ValueError("gpu_memory_fraction and kv_cache_bytes both size the KV cache: set one of them")
        return self

    @model_validator(mode="after")
    def _only_a_gpu_is_left(self) -> Self:
        if self.keep_alive_s is not None and self.device == "cpu":
            raise ValueError("keep_alive_s: a talker on the CPU has no GPU to leave")
        return self


class CodecConfig(Strict):
    """The codec decoder of one replica."""

    device: Device = "cpu"
    # The type of matrix products on a CPU, and of everything on a GPU. auto: float16 on a GPU; on a CPU bfloat16, if it
    # has units for it (AVX512-BF16, AMX) and a trial at the start finds the error 35 dB below the signal, else float32.
    # A start fails with a precision that the device has no units for.
    precision: DType = "auto"
    # The device that decodes: hybrid leaves the first frames of a stream to the talker's GPU, and all frames where the
    # pool is full. inline leaves all to it; the ingress then asks the talkers itself, and the pool only encodes
    # recordings to clone, for a talker on a CPU. pool leaves none to it: a talker loads no codec decoder (1.4 GiB).
    placement: CodecPlacement = "hybrid"
    # Decode in a replica: one is a thread, more are processes, on a GPU threads.
    workers: Annotated[int, Field(ge=1)] = 1
