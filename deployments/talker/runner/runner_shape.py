"""Which shapes the batches of a runner have."""

from dataclasses import dataclass
from typing import Literal

from deployments.gpu.graphs import buckets
from deployments.talker.text.prompt import MAX_PASS_POSITIONS

# Powers of two, with finer steps above 32; no 4: the kernels are faster with 8 rows (measured).
BATCHES = (1, 2, 8, 16, 32, 48, 64, 96, 128, 192, 256)
_PREFILL_POSITIONS = (16, 32, 64, 128, 256, MAX_PASS_POSITIONS)

NetworkKind = Literal["by_rows", "plain", "fused"]  # by_rows: each row attends to a gathered context of its own


@dataclass(frozen=True, slots=True)
class BatchMode:
    """How sequences become batches. The four modes below are all; `RunnerShape.mode` chooses one."""

    one_size: bool = False  # each step has max_num_seqs rows
    fixed_shapes: bool = False  # passes have sizes of a list, contexts their greatest length, as CUDA graphs need
    shares_passes: bool = False  # prompts of several sequences run in one pass
    retraces: bool = False  # a resumed sequence's frames run step by step: a prefill would round to other bits


# A CPU: a row's result depends on nothing but the row. PyTorch's products round by the number of rows, which is always
# the same in PADDED; our own kernels do not.
PADDED, EXACT = BatchMode(one_size=True), BatchMode()
# A GPU, or a CPU with `kernels: plain`; with `deterministic: true` codes do not depend on what else runs either.
BUCKETS = BatchMode(fixed_shapes=True, shares_passes=True)
DETERMINISTIC = BatchMode(one_size=True, fixed_shapes=True, retraces=True)


@dataclass(frozen=True, slots=True)
class RunnerShape:
    """What decides the shapes of a runner's batches, and the kernels that compute them."""

    max_num_seqs: int
    max_model_len: int
    deterministic: bool = False  # `by_rows` is so anyway
    networks: NetworkKind = "by_rows"
    attention: str = "auto"  # how the fused kernels attend: see `choose_attention`

    def mode(self, *, pads: bool) -> BatchMode:
        """`pads`: whether rows are independent only where each pass has the same number of rows."""
        if self.networks == "by_rows":
            return PADDED if pads else EXACT
        return DETERMINISTIC if self.deterministic else BUCKETS

    def sizes(self, mode: BatchMode, *, most_positions: int) -> tuple[list[int], list[int]]:
        """Numbers of rows of a step, and numbers of positions of a prefill pass, at most `most_positions`."""
        most, positions = self.max_num_seqs, [size for size in _PREFILL_POSITIONS if size <= most_positions]
        if mode.fixed_shapes:
            return [most] if mode.one_size else buckets(most, BATCHES), positions
        return ([most], [most]) if mode.one_size else (list(range(1, most + 1)), positions[-1:])
