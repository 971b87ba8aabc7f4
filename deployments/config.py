"""Settings for the talker and codec pools. `serve_app.config.AppConfig` contains them and reads them once from YAML."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Device = Literal["auto", "cpu", "cuda"]
CodecPlacement = Literal["hybrid", "pool", "inline"]
DType = Literal["auto", "float32", "bfloat16", "float16"]


class Strict(BaseModel):
    """Frozen settings that reject unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TalkerConfig(Strict):
    """Settings for a replica's talker engine."""

    device: Device = "auto"  # `auto` is `cuda` if Ray assigns a GPU to the replica, else `cpu`
    threads: Annotated[int, Field(ge=1)] = 1  # torch threads of the engine process
    max_num_seqs: Annotated[int, Field(ge=1)] = 8  # maximum batch size
    max_num_waiting: Annotated[int, Field(ge=0)] = 16  # maximum length of the queue in front of the batch
    max_model_len: Annotated[int, Field(ge=64)] = 4096  # maximum length of one sequence: its prompt and its frames
    # Share of the GPU memory that the engine may use. The default is 0.85. The KV cache gets the memory that weights,
    # codec and CUDA graphs leave free, up to the size that it can use.
    gpu_memory_fraction: Annotated[float | None, Field(gt=0, le=1)] = None
    kv_cache_bytes: Annotated[int | None, Field(ge=1)] = None  # size of the KV cache, instead of `gpu_memory_fraction`
    # Idle time after which the engine moves its GPU memory to the host (driver 570 or newer). The next request moves
    # it back. If unset, the memory stays on the GPU.
    keep_alive_s: Annotated[float | None, Field(gt=0)] = None
    # Attention kernel of the fused kernels. `auto` is `triton`, which is faster. The start-up log names the kernel.
    attention: Literal["auto", "triton", "flash_attn"] = "auto"
    # `auto` uses fused Triton kernels on a GPU and C kernels on a CPU, if they support the model. `plain` uses PyTorch.
    kernels: Literal["auto", "plain"] = "auto"
    # Makes codes on a GPU independent of the batch. Each step then takes as long as a step with a full batch.
    deterministic: bool = False

    @model_validator(mode="after")
    def _sizes_once(self) -> Self:
        if self.gpu_memory_fraction is not None and self.kv_cache_bytes is not None:
            raise ValueError("gpu_memory_fraction and kv_cache_bytes both size the KV cache: set one of them")
        return self

    @model_validator(mode="after")
    def _only_a_gpu_is_left(self) -> Self:
        if self.keep_alive_s is not None and self.device == "cpu":
            raise ValueError("keep_alive_s requires a talker on a GPU")
        return self


class CodecConfig(Strict):
    """Settings for a replica's codec decoder."""

    device: Device = "cpu"  # device of the codec pool. `auto` is `cuda` if Ray assigns a GPU to the replica, else `cpu`
    # Number format for decoding. `auto` is `float16` on a GPU. On a CPU it is `bfloat16` if the CPU has AVX512-BF16 or
    # AMX and a trial finds the error 35 dB below the signal, else `float32`. The start fails if the device does not
    # support the format.
    precision: DType = "auto"
    # Where frames are decoded. `inline` decodes all of them on the talker's device; a codec pool then only encodes
    # recordings for talkers on CPUs. `pool` decodes all of them in the codec pool, which frees 1.4 GiB on the talker's
    # GPU. `hybrid` decodes the first frames of a stream on the talker's GPU, and all frames while the pool is full.
    placement: CodecPlacement = "hybrid"
    # Decoders of one replica: one thread, or several processes on a CPU and several threads on a GPU.
    workers: Annotated[int, Field(ge=1)] = 1
