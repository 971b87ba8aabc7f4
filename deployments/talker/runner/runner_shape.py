"""Which shapes the batches of a runner have."""

from dataclasses import dataclass

from deployments.gpu.graphs import buckets
from deployments.talker.model.input_tables import MAX_PASS_POSITIONS
from deployments.talker.networks.frame_networks import NetworkKind

# Powers of two, with finer steps above 32; no 4: the kernels are faster with 8 rows (measured).
BATCHES = (1, 2, 8, 16, 32, 48, 64, 96, 128, 192, 256)
_PREFILL_POSITIONS = (16, 32, 64, 128, 256, MAX_PASS_POSITIONS)


@dataclass(frozen=True, slots=True)
class BatchMode:
    """How sequences become batches. The modes below are all; `RunnerShape.mode` chooses one."""

    one_size: bool = False  # each step has max_num_seqs rows
    fixed_shapes: bool = False  # passes have sizes of a list, contexts their greatest length, as CUDA graphs need
    shares_passes: bool = False  # prompts of several sequences run in one pass
    retraces: bool = False  # a resumed sequence's frames run step by step: a prefill would round to other bits


BUCKETS = BatchMode(fixed_shapes=True, shares_passes=True)
_MODES: dict[NetworkKind, BatchMode] = {
    "cpu": BatchMode(),  # its products round a row in the same way beside any number of rows
    "exact": BatchMode(one_size=True),  # PyTorch's products round by the number of rows
    "plain": BUCKETS,
    "fused": BUCKETS,
}
# With `deterministic: true`, in place of BUCKETS: codes do not depend on what else runs either.
DETERMINISTIC = BatchMode(one_size=True, fixed_shapes=True, retraces=True)


@dataclass(frozen=True, slots=True)
class RunnerShape:
    """What decides the shapes of a runner's batches, and the kernels that compute them."""

    max_num_seqs: int
    max_model_len: int
    networks: NetworkKind
    deterministic: bool = False  # `cpu` and `exact` are so anyway
    attention: str = "auto"  # how `fused` attends: see `choose_attention`

    @property
    def mode(self) -> BatchMode:
        mode = _MODES[self.networks]
        return DETERMINISTIC if self.deterministic and mode is BUCKETS else mode

    def sizes(self, *, most_positions: int) -> tuple[list[int], list[int]]:
        """Numbers of rows of a step, and numbers of positions of a prefill pass, at most `most_positions`."""
        mode, most = self.mode, self.max_num_seqs
        positions = [size for size in _PREFILL_POSITIONS if size <= most_positions]
        if mode.fixed_shapes:
            return [most] if mode.one_size else buckets(most, BATCHES), positions
        return ([most], [most]) if mode.one_size else (list(range(1, most + 1)), positions[-1:])
