"""Loading what a codec replica runs: the decoder, and the encoder where the checkpoint clones."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from deployments.codec.config import SpeechTokenizerConfig
from deployments.codec.decoder import CodecDecoder
from deployments.codec.encoder import CodecEncoder
from deployments.codec.state import DecoderState
from deployments.config import CodecConfig
from deployments.errors import InvalidRequest
from deployments.model_store import locate
from deployments.protocol import Codes, ModelKind


@dataclass(frozen=True, slots=True)
class Codec:
    """A loaded speech tokenizer."""

    decoder: CodecDecoder
    encoder: CodecEncoder | None
    sample_rate: int

    def encode_reference(self, audio: NDArray[np.float32]) -> tuple[Codes, DecoderState]:
        """Codes [frames, num_code_groups] of a recording [samples], and the decoder's state behind them."""
        if self.encoder is None:
            raise InvalidRequest("this checkpoint has no speech encoder, so it cannot clone a recording", "ref_audio")
        codes = self.encoder.encode(audio)
        batch = torch.from_numpy(codes).long()[None]
        _, (state,) = self.decoder.decode(batch, [self.decoder.initial_state()])
        return codes, state


def load_codec(model: str, config: CodecConfig) -> Codec:
    """Find and load the speech tokenizer of `model`; raises CheckpointError."""
    torch.set_num_threads(1)
    checkpoint = locate(model)
    directory = checkpoint / "speech_tokenizer"
    device = "cuda" if config.device == "auto" and torch.cuda.is_available() else config.device.replace("auto", "cpu")
    dtype: torch.dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    decoder = CodecDecoder.load(directory, device=device, dtype=dtype)
    encoder = CodecEncoder.load(directory) if _clones(checkpoint) else None
    _warm_up(decoder, config)
    return Codec(decoder, encoder, SpeechTokenizerConfig.load(directory).sample_rate)


def _warm_up(decoder: CodecDecoder, config: CodecConfig) -> None:
    """Decode a chunk of every size once: the first call of a shape may take a second on a GPU."""
    for num_frames in sorted(set(config.chunk_frames)):
        codes = torch.zeros((1, num_frames, decoder.config.num_quantizers), dtype=torch.long)
        decoder.decode(codes, [decoder.initial_state()])


def _clones(checkpoint: Path) -> bool:
    """Only base checkpoints take a recording as their voice."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("tts_model_type") == ModelKind.BASE)
