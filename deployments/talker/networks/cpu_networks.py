"""The networks in C, on a CPU: all of a decoding step, and prompts, in float32."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from deployments.talker.kernels.cpu_kernels import CpuStack, RowCache, RowProduct
from deployments.talker.model.predictor import SampleCode
from deployments.talker.networks.frame_networks import FrameNetworks, NetworkKind, PrefillTensors
from deployments.talker.state.batch_state import BatchState, Context
from deployments.talker.state.kv_cache import KVCache
from deployments.talker.text.prompt import InputTables


class CpuNetworks(FrameNetworks):
    """The `cpu` kind. A pass may have any number of rows, because none depends on another."""

    kind: NetworkKind = "cpu"

    def __init__(self, tables: InputTables, state: BatchState, cache: KVCache, *, num_rows: int) -> None:
        super().__init__(tables, state, cache, num_rows=num_rows)
        talker, predictor = self.talker, self.talker.code_predictor
        self._stack = CpuStack(talker.model, self.config.talker, talker.rotary)
        self._predictor = CpuStack(predictor.model, self.config.predictor, predictor.rotary)
        self._first_head = RowProduct(talker.codec_head.weight)
        self._heads = [RowProduct(head.get_parameter("weight")) for head in predictor.lm_head]
        narrow = predictor.small_to_mtp_projection
        self._narrow = (RowProduct(narrow.weight), narrow.bias) if isinstance(narrow, nn.Linear) else None
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
