"""Lookup tables for the talker's input rows: projected text embeddings and codec embeddings.

An input row is the sum of one entry from each table. *Dense* rows are not table entries: speaker vectors, and frames of
a reference or a resumed stream. During a pass, dense rows are stored after the codec's entries.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.talker.model.talker import Talker

Ids = NDArray[np.int32]

# Number of dense rows after the codec table, and therefore the maximum number of rows in a prefill pass
MAX_PASS_POSITIONS = 512
# Rows per projection on a CPU. The number is fixed because it affects how a row is rounded.
_CPU_ROWS = 16
_GPU_ROWS = 8192


class InputTables:
    """A talker's input tables.

    On a GPU, all tokens are projected at load time, and the talker's text embedding is deleted. On a CPU, each token is
    projected when it first occurs.
    """

    def __init__(self, talker: Talker) -> None:
        self.talker = talker
        config, weight = talker.config, talker.codec_head.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.no_text, self.no_code = config.text_vocab_size, config.vocab_size
        self.first_dense = config.vocab_size + 1
        hidden = config.talker.hidden_size
        # Left uninitialized, because on a CPU only pages for tokens in use should become resident.
        self.text = torch.empty((config.text_vocab_size + 1, hidden), dtype=self.dtype, device=self.device)
        self.codec = torch.zeros((self.first_dense + MAX_PASS_POSITIONS, hidden), dtype=self.dtype, device=self.device)
        self._known = np.zeros(config.text_vocab_size, dtype=bool)
        self.pad = config.tokens.tts_pad
        self._fill()

    @property
    def dense(self) -> Tensor:
        """Dense rows after the codec table, [MAX_PASS_POSITIONS, hidden]."""
        return self.codec[self.first_dense :]

    def project(self, ids: Ids) -> None:
        """Project those tokens in `ids` that are not yet in the text table."""
        missing = ids[ids < self.no_text]
        missing = np.unique(missing[~self._known[missing]])
        for start in range(0, len(missing), _CPU_ROWS):
            batch = missing[start : start + _CPU_ROWS]
            padded = np.pad(batch, (0, _CPU_ROWS - len(batch)))
            self.text[torch.from_numpy(batch).long()] = self.talker.embed_text(padded.tolist())[: len(batch)]
        self._known[missing] = True

    def rows(self, text_ids: Tensor, codec_ids: Tensor) -> Tensor:
        """Return input rows [rows, hidden] for table indices [rows] int32 or int64."""
        return self.text[text_ids] + self.codec[codec_ids]

    @torch.inference_mode()
    def _fill(self) -> None:
        self.text[self.no_text] = 0
        self.codec[: self.no_code] = self.talker.model.codec_embedding.weight
        if self.device.type == "cpu":
            self.project(np.array([self.pad], dtype=np.int32))
            return
        for start in range(0, self.no_text, _GPU_ROWS):
            stop = min(start + _GPU_ROWS, self.no_text)
            self.text[start:stop] = self.talker.text_projection(self.talker.model.text_embedding.weight[start:stop])
        self._known[:] = True
        del self.talker.model.text_embedding  # frees a sixth of the checkpoint's memory; replaced by the table
