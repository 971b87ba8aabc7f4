"""Run the official package `qwen-tts` for comparison. It pins its own transformers, so it needs a separate environment.

Run in that environment, without the rest of Talkray: `python -m talkray_tools.official REQUEST.json SPEECH.npz`.
"""

import importlib
import json
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_METHODS = {
    "custom_voice": "generate_custom_voice",
    "voice_design": "generate_voice_design",
    "base": "generate_voice_clone",
}


def stub_unused_dependencies() -> None:
    """Stub the dependencies of `qwen_tts` that only its 25 Hz tokenizer and its demo need."""
    for name, attributes in (
        ("sox", {"Transformer": object}),
        ("onnxruntime", {"SessionOptions": object}),
        ("torchaudio", {}),
        ("torchaudio.compliance", {}),
        ("torchaudio.compliance.kaldi", {}),
    ):
        try:
            importlib.import_module(name)
        except ImportError:
            _stub(name, attributes)


def _stub(name: str, attributes: Mapping[str, object]) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(attributes)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


class OfficialModel:
    """Checkpoint loaded by the official package in float32 on the CPU."""

    def __init__(self, checkpoint: str) -> None:
        stub_unused_dependencies()
        package = importlib.import_module("qwen_tts")
        load = package.Qwen3TTSModel.from_pretrained
        self.package = load(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
        self.kind: str = self.package.model.tts_model_type
        self.frame_samples: int = self.package.model.speech_tokenizer.get_decode_upsample_rate()
        self._codes = torch.empty(0)
        self._generate = self.package.model.generate
        self.package.model.generate = self._keep_codes

    def _keep_codes(self, *arguments: Any, **options: Any) -> Any:
        """Intercept the codes ahead of the decoder, because the wrapper returns only audio."""
        result = self._generate(*arguments, **options)
        self._codes = result[0][0]
        return result

    def say(self, **arguments: Any) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
        """Return codes [frames, groups] and audio [samples] for the arguments of the wrapper's generate method."""
        wavs, _ = getattr(self.package, _METHODS[self.kind])(**arguments)
        return self._codes.cpu().numpy().astype(np.int16), wavs[0]


def main(request_file: str, speech_file: str) -> None:
    """Run one request: `checkpoint`, and `arguments` of `say`. A reference is a file of float32 samples."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    arguments = request["arguments"]
    if "ref_audio" in arguments:
        file, sample_rate = arguments["ref_audio"]
        arguments["ref_audio"] = (np.load(file), sample_rate)
    codes, wav = OfficialModel(request["checkpoint"]).say(**arguments)
    np.savez(speech_file, codes=codes, wav=wav)


if __name__ == "__main__":
    main(*sys.argv[1:])
