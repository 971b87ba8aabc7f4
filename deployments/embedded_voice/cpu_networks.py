"""C implementations of the networks for CPUs (cpu_networks.c): prefill and decode in float32, with float16 weights.

They are used if a C compiler is available, and on x86 only if the CPU has AVX2. ctypes releases the GIL.
A row's result does not depend on the other rows.
"""

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from deployments.c_library import COUNT, POINTER, built_library
from deployments.huge_pages import copy_to_huge_pages
from deployments.talker.model.input_tables import InputTables
from deployments.talker.model.layers import DecoderLayer, DecoderStack, RotaryTable
from deployments.talker.model.model_config import TransformerConfig
from deployments.talker.model.talker import Talker
from deployments.talker.networks.frame_networks import NetworkKind, PrefillTensors
from deployments.talker.networks.unfused_networks import UnfusedNetworks
from deployments.talker.sampling import torch_sampler
from deployments.talker.sampling.torch_sampler import NoiseKey
from deployments.talker.state.batch_state import BatchOptions, BatchState, Context
from deployments.talker.state.kv_cache import KVCache

_INTERFACE = 6  # version of the functions and their arguments; must match the one in cpu_networks.c
_TILE = 16  # number of outputs with weights stored side by side
_WIDEST = 512  # maximum hidden size; for wider stacks, several threads read the weights faster
_PARAMETERS = {
    "multiply": [*[POINTER] * 3, COUNT],
    "run_stack": [*[POINTER] * 3, COUNT, *[POINTER] * 2, *[COUNT] * 3, POINTER],
    "complete": [*[POINTER] * 6, COUNT, *[POINTER] * 2],
}


class _Product(ctypes.Structure):
    _fields_ = (("weights", POINTER), ("inputs", COUNT), ("outputs", COUNT), ("halves", COUNT))


class _Layer(ctypes.Structure):
    _fields_ = (*((name, POINTER) for name in ("input_norm", "q_norm", "k_norm", "post_norm")),
                *((name, _Product) for name in ("qkv", "o", "gate", "up", "down")))  # fmt: skip


class _Stack(ctypes.Structure):
    _fields_ = (*((name, COUNT) for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim")),
                ("eps", ctypes.c_float), *((name, POINTER) for name in ("layer", "norm", "cosines", "sines")),
                )  # fmt: skip


class _Draw(ctypes.Structure):
    _fields_ = tuple((name, POINTER) for name in ("sample", "options", "seeds", "frames"))


class _Predictor(ctypes.Structure):
    _fields_ = (*((name, POINTER) for name in ("stack", "narrow", "bias", "heads", "tables")),
                *((name, COUNT) for name in ("groups", "wide")))  # fmt: skip


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
        """Pack `weights` [outputs, inputs] float32. If there are several, their outputs are concatenated.

        Stores float16, which takes half as long to read, if no weight changes.
        """
        joined = torch.cat(weights).float()
        self.outputs, inputs = joined.shape
        halves = torch.equal(joined.half().float(), joined)
        padded = nn.functional.pad(joined.half() if halves else joined, (0, 0, 0, -self.outputs % _TILE))
        self._packed = copy_to_huge_pages(padded.view(-1, _TILE, inputs).transpose(1, 2))
        self.as_struct = _Product(self._packed.data_ptr(), inputs, self.outputs, halves)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply float32 x [rows, inputs]. Returns [rows, outputs]."""
        assert _built is not None
        x, out = x.contiguous(), torch.empty(len(x), self.outputs)
        _built.multiply(out.data_ptr(), x.data_ptr(), ctypes.byref(self.as_struct), len(x))
        return out


@dataclass(frozen=True, slots=True)
class RowCache:
    """Where the rows' keys and values are stored."""

    keys: Tensor  # [layers, slots, kv_heads, head_dim]; layers need not be adjacent
    values: Tensor
    tables: Tensor  # [rows, blocks] int32; position p is in slot tables[row, p // block] * block + p % block
    block: int

    def as_struct(self, tables: Tensor) -> _Cache:
        """Return the cache with `tables`, which the caller keeps alive."""
        return _Cache(
            self.keys.data_ptr(), self.values.data_ptr(), self.keys.stride(0), tables.data_ptr(), tables.shape[1],
            self.block,
        )  # fmt: skip


class CpuStack:
    """Decoder stack, excluding the embeddings."""

    def __init__(self, stack: DecoderStack, config: TransformerConfig, rotary: RotaryTable) -> None:
        self._config, self._rotary = config, rotary
        self._kept: list[object] = []  # memory that the structures refer to
        layers = (_Layer * config.num_layers)(*(self._of_layer(layer) for layer in stack.layers))
        self._kept.append(layers)
        self.as_struct = _Stack(
            config.num_layers, config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads,
            config.head_dim, config.rms_norm_eps, ctypes.addressof(layers), self._pointer(stack.norm.weight),
            rotary.cos.data_ptr(), rotary.sin.data_ptr(),
        )  # fmt: skip

    def run(
        self, x: Tensor, positions: Tensor, where: RowCache, *, followed: tuple[int, int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Convert rows [rows, hidden] float32 at `positions` [rows] int32 to hidden states [rows, hidden].

        Stores keys and values first, so consecutive rows may belong to one sequence. Also returns the attention weights
        [rows, positions] of the layer and head in `followed`.
        """
        assert _built is not None
        rows = len(x)
        hidden = x.clone(memory_format=torch.contiguous_format)
        positions, tables = positions.int().contiguous(), where.tables.contiguous()
        longest = int(positions.max()) + 1
        scratch = torch.empty(self.scratch_size(rows, longest))
        weights = None if followed is None else torch.zeros(rows, longest)
        layer, head = followed or (0, 0)
        _built.run_stack(
            ctypes.byref(self.as_struct), ctypes.byref(where.as_struct(tables)), hidden.data_ptr(), rows,
            positions.data_ptr(), None if weights is None else weights.data_ptr(), longest, layer, head,
            scratch.data_ptr(),
        )  # fmt: skip
        return hidden, weights

    def scratch_size(self, rows: int, longest: int) -> int:
        """Return how many values of scratch memory a pass takes, with contexts of up to `longest` positions."""
        config = self._config
        heads = 2 * (config.num_heads + config.num_kv_heads)
        return rows * (config.hidden_size + heads * config.head_dim + 2 * config.intermediate_size) + longest

    def _of_layer(self, layer: nn.Module) -> _Layer:
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.self_attn, layer.mlp
        norms = (layer.input_layernorm, attention.q_norm, attention.k_norm, layer.post_attention_layernorm)
        products = [
            RowProduct(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
            *(RowProduct(each.weight) for each in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)),
        ]
        self._kept += products
        return _Layer(*(self._pointer(norm.weight) for norm in norms), *(product.as_struct for product in products))

    def _pointer(self, weight: Tensor) -> int:
        kept = weight.float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


class CpuPredictor:
    """Code predictor that completes frames in one call."""

    def __init__(self, talker: Talker) -> None:
        predictor, self._config = talker.code_predictor, talker.config
        self.stack = CpuStack(predictor.model, talker.config.predictor, predictor.rotary)
        self._heads = [RowProduct(head.get_parameter("weight")) for head in predictor.lm_head]
        tables = [table.get_parameter("weight").float().contiguous() for table in predictor.embeddings]
        heads = (_Product * len(tables))(*(head.as_struct for head in self._heads))
        pointers = (POINTER * len(tables))(*(table.data_ptr() for table in tables))
        linear = predictor.small_to_mtp_projection
        narrow = bias = None
        if isinstance(linear, nn.Linear):
            self._narrow, bias = RowProduct(linear.weight), linear.bias.float().contiguous()
            narrow = ctypes.addressof(self._narrow.as_struct)
        self._kept = (heads, tables, pointers, bias)
        self._as_struct = _Predictor(
            ctypes.addressof(self.stack.as_struct), narrow, None if bias is None else bias.data_ptr(),
            ctypes.addressof(heads), ctypes.addressof(pointers), talker.config.num_code_groups,
            talker.config.talker.hidden_size,
        )  # fmt: skip

    def complete(self, codes: Tensor, hidden: Tensor, total: Tensor, where: RowCache, noise_key: _Draw) -> None:
        """Complete `codes` [groups, rows] int64 from those of codebook 0, and add their embeddings to `total`.

        `hidden` and `total` are [rows, talker hidden] float32; `total` is the embedding of codebook 0.
        """
        assert _built is not None
        groups, rows = codes.shape
        config, positions = self._config, torch.empty(rows, dtype=torch.int32)
        vocab, width = config.code_vocab_size, config.talker.hidden_size + config.predictor.hidden_size
        rest = max(self.stack.scratch_size(rows, groups), 2 * vocab)
        scratch = torch.empty(rows * (width + vocab) + rest)
        cache = where.as_struct(where.tables)
        _built.complete(
            ctypes.byref(self._as_struct), ctypes.byref(cache), ctypes.byref(noise_key), codes.data_ptr(),
            hidden.data_ptr(), total.data_ptr(), rows, positions.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip


class CpuNetworks(UnfusedNetworks):
    """Networks of the `cpu` kind. A pass can have any number of rows, because rows are independent."""

    kind: NetworkKind = "cpu"

    def __init__(self, tables: InputTables, state: BatchState, cache: KVCache, *, attention: str) -> None:
        super().__init__(tables, state, cache, attention=attention)
        self._stack = CpuStack(self.talker.model, self.config.talker, self.talker.rotary)
        self._predictor = CpuPredictor(self.talker)
        self._first_head = RowProduct(self.talker.codec_head.weight)

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

    def _complete(
        self, hidden: Tensor, code0: Tensor, options: BatchOptions, noise_key: NoiseKey
    ) -> tuple[Tensor, Tensor]:
        if not self.samples_in_c:
            return super()._complete(hidden, code0, options, noise_key)
        rows, groups = len(hidden), self.config.num_code_groups
        codes, total = torch.empty(groups, rows, dtype=torch.long), self.talker.model.codec_embedding(code0)
        codes[0] = code0
        packed = options.packed.contiguous()
        drawing = _Draw(
            torch_sampler.sample_address(), packed.data_ptr(), noise_key.seeds.data_ptr(), noise_key.frames.data_ptr()
        )
        where = RowCache(self._frame_keys, self._frame_values, self._frame_tables[:rows], groups)
        self._predictor.complete(codes, hidden, total, where, drawing)
        return codes.T, total

    def _step(self, inputs: Tensor, context: Context, length: int) -> tuple[Tensor, Tensor | None]:
        followed = self.config.text.alignment_head
        return self._stack.run(inputs, context.positions, self._where(context), followed=followed)

    def _run_prompt(self, owners: Tensor, inputs: Tensor, context: Context, length: int) -> Tensor:
        return self._stack.run(inputs, context.positions, self._where(context))[0]

    def _where(self, context: Context) -> RowCache:
        return RowCache(self.cache.keys, self.cache.values, context.block_tables, self.cache.block_size)
