"""How much of a GPU's memory is left for keys and values.

They are allocated behind the weights and the codec, whose size is then known, and in front of what a step needs: room
for that is kept.
"""

from dataclasses import dataclass

import torch

from deployments.errors import EngineError

GIB = 1 << 30
# Of the GPU, where the settings say nothing.
DEFAULT_FRACTION = 0.85
# On a CPU, where the settings say nothing.
CPU_CACHE_BYTES = GIB
# CUDA's context with the kernels that are loaded into it: it exists before anything can be measured.
_CONTEXT_BYTES = 600 << 20
# Behind keys and values: tables of the predictor, activations, workspaces of the matrix library, recorded graphs.
_STEP_BYTES = 900 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the settings say, and what follows from them."""

    fraction: float  # of the GPU
    least_bytes: int  # keys and values of one sequence of the greatest length
    most_bytes: int  # those of a full batch of such sequences


class GpuMemory:
    """Memory of one GPU. To be made before anything is loaded: what is used then belongs to others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free_before, self.total = torch.cuda.mem_get_info(device)

    def kv_bytes(self, wanted: Wanted) -> int:
        """Bytes for keys and values, once all else is loaded. Raises EngineError where they are too few."""
        free, _ = torch.cuda.mem_get_info(self.device)
        loaded = self._free_before - free
        allowed = int(wanted.fraction * self.total) - _CONTEXT_BYTES - loaded - _STEP_BYTES
        room = min(allowed, free - _STEP_BYTES)
        if room < wanted.least_bytes:
            raise EngineError(self._too_little(wanted, loaded, is_shared=allowed > room))
        return min(room, wanted.most_bytes)

    def _too_little(self, wanted: Wanted, loaded: int, *, is_shared: bool) -> str:
        needed = _CONTEXT_BYTES + loaded + _STEP_BYTES + wanted.least_bytes
        others = self.total - self._free_before - _CONTEXT_BYTES
        may = f"talker.gpu_memory_fraction {wanted.fraction:g} allows {wanted.fraction * self.total / GIB:.1f} GiB"
        if is_shared:
            may = f"others use {others / GIB:.1f} GiB"
        return (
            f"too little GPU memory: {may} of {self.total / GIB:.1f} GiB, the engine needs {needed / GIB:.1f} GiB"
            f" (a fraction of {needed / self.total:.2g}): {loaded / GIB:.1f} for weights and codec,"
            f" {(_CONTEXT_BYTES + _STEP_BYTES) / GIB:.1f} for CUDA and a step, {wanted.least_bytes / GIB:.2f} for one"
            " sequence of the greatest length. What helps: a larger talker.gpu_memory_fraction, a smaller"
            " talker.max_model_len or talker.max_num_seqs, a 0.6B model"
        )
