"""C implementations of the networks for CPUs (cpu_networks.c): prefill and decode in float32.

They are used if a C compiler is available, and on x86 only if the CPU has AVX2. ctypes releases the GIL.
A row's result does not depend on the other rows.
"""

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from deployments.c_library import COUNT, POINTER, built_library
from deployments.talker.model.input_tables import InputTables
from deployments.talker.model.layers import DecoderLayer, DecoderStack, RotaryTable
from deployments.talker.model.model_config import TransformerConfig
from deployments.talker.model.talker import SampleCode
from deployments.talker.networks.frame_networks import NetworkKind, PrefillTensors
from deployments.talker.networks.unfused_networks import UnfusedNetworks
from deployments.talker.state.batch_state import BatchState, Context
from deployments.talker.state.kv_cache import KVCache

_INTERFACE = 5  # version of the functions and their arguments; must match the one in cpu_networks.c
_TILE = 16  # number of outputs with weights stored side by side
_WIDEST = 512  # maximum hidden size; for wider stacks, several threads read the weights faster
_PARAMETERS = {
    "multiply": [*[POINTER] * 3, *[COUNT] * 3],
    "run_stack": [*[POINTER] * 4, COUNT, *[POINTER] * 4, *[COUNT] * 3, POINTER],
}


class _Shape(ctypes.Structure):
    _fields_ = (*((name, COUNT) for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim")),
                ("eps", ctypes.c_float))  # fmt: skip


class _Cache(ctypes.Structure):
    _fields_ = (("keys", POINTER), ("values", POINTER), ("layer", COUNT), ("tables", POINTER), ("width", COUNT),
                ("block", COUNT))  # fmt: skip


def _suited_library() -> ctypes.CDLL | None:
    library = built_library("deployments.embedded_voice._cpu_networks", _PARAMETERS, interface=_INTERFACE)
    return library if library is not None and library.suits() else None


_built = _suited_library()


def fits(*configs: TransformerConfig) -> bool:
    """Return whether the kernels are built, support stacks with these shapes, and are faster than torch's threads."""
    sizes = [size for config in configs for size in (config.hidden_size, config.intermediate_size, config.head_dim)]
    widest = max(config.hidden_size for config in configs)
    return _built is not None and widest <= _WIDEST and not any(size % _TILE for size in sizes)


class RowProduct:
    """Matrix product without bias that sums in the same order for any number of rows."""

    def __init__(self, *weights: Tensor) -> None:
        """Pack `weights` [outputs, inputs] float32. If there are several, their outputs are concatenated."""
        joined = torch.cat(weights).float()
        self.outputs, self.inputs = joined.shape
        padded = nn.functional.pad(joined, (0, 0, 0, -self.outputs % _TILE))
        self.packed = padded.view(-1, _TILE, self.inputs).transpose(1, 2).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply float32 x [rows, inputs]. Returns [rows, outputs]."""
        assert _built is not None
        x, out = x.contiguous(), torch.empty(len(x), self.outputs)
        _built.multiply(out.data_ptr(), x.data_ptr(), self.packed.data_ptr(), len(x), self.inputs, self.outputs)
        return out


@dataclass(frozen=True, slots=True)
class RowCache:
    """Where the rows' keys and values are stored."""

    keys: Tensor  # [layers, slots, kv_heads, head_dim]; layers need not be adjacent
    values: Tensor
    tables: Tensor  # [rows, blocks] int32; position p is in slot tables[row, p // block] * block + p % block
    block: int


class CpuStack:
    """Decoder stack, excluding the embeddings."""

    def __init__(self, stack: DecoderStack, config: TransformerConfig, rotary: RotaryTable) -> None:
        self._config, self._rotary = config, rotary
        self._tensors = [tensor for layer in stack.layers for tensor in self._of_layer(layer)]
        self._tensors.append(stack.norm.weight.float().contiguous())
        self._pointers = (POINTER * len(self._tensors))(*(tensor.data_ptr() for tensor in self._tensors))
        self._shape = _Shape(
            config.num_layers, config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads,
            config.head_dim, config.rms_norm_eps,
        )  # fmt: skip

    def run(
        self, x: Tensor, positions: Tensor, where: RowCache, *, followed: tuple[int, int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Convert rows [rows, hidden] float32 at `positions` [rows] int32 to hidden states [rows, hidden].

        Stores keys and values first, so consecutive rows may belong to one sequence. Also returns the attention weights
        [rows, positions] of the layer and head in `followed`.
        """
        assert _built is not None
        config = self._config
        rows = len(x)
        hidden = x.clone(memory_format=torch.contiguous_format)
        positions = positions.int().contiguous()
        tables = where.tables.contiguous()
        cache = _Cache(
            where.keys.data_ptr(), where.values.data_ptr(), where.keys.stride(0), tables.data_ptr(), tables.shape[1],
            where.block,
        )  # fmt: skip
        longest = int(positions.max()) + 1
        heads = config.num_heads + 2 * config.num_kv_heads
        a_row = config.hidden_size + (heads + config.num_heads) * config.head_dim + 2 * config.intermediate_size
        scratch = torch.empty(rows * a_row + longest)
        weights = None if followed is None else torch.zeros(rows, longest)
        layer, head = followed or (0, 0)
        _built.run_stack(
            ctypes.byref(self._shape), self._pointers, ctypes.byref(cache), hidden.data_ptr(), rows,
            positions.data_ptr(), self._rotary.cos.data_ptr(), self._rotary.sin.data_ptr(),
            None if weights is None else weights.data_ptr(), longest, layer, head, scratch.data_ptr(),
        )  # fmt: skip
        return hidden, weights

    @staticmethod
    def _of_layer(layer: nn.Module) -> list[Tensor]:
        """Return a layer's tensors in the order that `run_stack` expects."""
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.self_attn, layer.mlp

        def packed(*products: nn.Linear) -> Tensor:
            return RowProduct(*(each.weight for each in products)).packed

        return [
            layer.input_layernorm.weight.contiguous(),
            packed(attention.q_proj, attention.k_proj, attention.v_proj),
            attention.q_norm.weight.contiguous(),
            attention.k_norm.weight.contiguous(),
            packed(attention.o_proj),
            layer.post_attention_layernorm.weight.contiguous(),
            packed(mlp.gate_proj),
            packed(mlp.up_proj),
            packed(mlp.down_proj),
        ]


class CpuNetworks(UnfusedNetworks):
    """Networks of the `cpu` kind. A pass can have any number of rows, because rows are independent."""

    kind: NetworkKind = "cpu"

    def __init__(self, tables: InputTables, state: BatchState, cache: KVCache, *, attention: str) -> None:
        super().__init__(tables, state, cache, attention=attention)
        talker, predictor = self.talker, self.talker.code_predictor
        self._stack = CpuStack(talker.model, self.config.talker, talker.rotary)
        self._predictor = CpuStack(predictor.model, self.config.predictor, predictor.rotary)
        self._first_head = RowProduct(talker.codec_head.weight)
        self._heads = [RowProduct(head.get_parameter("weight")) for head in predictor.lm_head]
        narrow = predictor.small_to_mtp_projection
        self._narrow = (RowProduct(narrow.weight), narrow.bias) if isinstance(narrow, nn.Linear) else None

    def _make_buffers(self, *, num_rows: int, num_positions: int) -> None:
        super()._make_buffers(num_rows=num_rows, num_positions=num_positions)
        shape, groups = self.config.predictor, self.config.num_code_groups
        self._frame_keys = torch.zeros(shape.num_layers, num_rows * groups, shape.num_kv_heads, shape.head_dim)
        self._frame_values = torch.zeros_like(self._frame_keys)
        self._frame_tables = torch.arange(num_rows, dtype=torch.int32)[:, None]

    def prefill(self, tensors: PrefillTensors, *, length: int) -> None:
        used = int((tensors.owners != self.state.scratch_row).sum())
        by_position = ("text_ids", "codec_ids", "owners", "positions")
        used_tensors = replace(tensors, **{name: getattr(tensors, name)[:used] for name in by_position})
        super().prefill(used_tensors, length=length)

    def _first_logits(self, hidden: Tensor) -> Tensor:
        return self._first_head(hidden)

    def _complete(self, hidden: Tensor, code0: Tensor, *, sample: SampleCode) -> tuple[Tensor, Tensor]:
        talker, tables = self.talker, self._frame_tables[: len(hidden)]
        where = RowCache(self._frame_keys, self._frame_values, tables, self.config.num_code_groups)
        codes, total = [code0], talker.model.codec_embedding(code0)
        self._next_position(hidden, 0, where)
        row = total
        for group, (head, table) in enumerate(zip(self._heads, talker.code_predictor.embeddings, strict=True), start=1):
            codes.append(sample(head(self._next_position(row, group, where)), group))
            row = table(codes[-1])
            total = total + row
        return torch.stack(codes, dim=1), total

    def _next_position(self, row: Tensor, position: int, where: RowCache) -> Tensor:
        if self._narrow is not None:
            product, bias = self._narrow
            row = product(row) + bias
        return self._predictor.run(row, torch.full((len(row),), position, dtype=torch.int32), where)[0]

    def _step(self, inputs: Tensor, context: Context, length: int) -> tuple[Tensor, Tensor | None]:
        followed = self.config.text.alignment_head
        return self._stack.run(inputs, context.positions, self._where(context), followed=followed)

    def _run_prompt(self, owners: Tensor, inputs: Tensor, context: Context, length: int) -> Tensor:
        return self._stack.run(inputs, context.positions, self._where(context))[0]

    def _where(self, context: Context) -> RowCache:
        return RowCache(self.cache.keys, self.cache.values, context.block_tables, self.cache.block_size)
