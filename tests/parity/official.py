"""The official package over one checkpoint: writes what it says to an .npz file.

Runs in the environment of the official package: `.parity/bin/python -m tests.parity.official CHECKPOINT OUT.npz`.
"""

import argparse
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.parity.cases import (
    DECODINGS,
    SAMPLE_RATE,
    SEED,
    WAV_DECODING,
    Case,
    Extent,
    case_key,
    cases_of,
    reference_audio,
)

Arrays = dict[str, np.ndarray]


def stub_unused_dependencies() -> None:
    """The package imports its 25 Hz tokenizer, whose dependencies no 12 Hz model uses."""
    for name, attributes in (
        ("sox", {"Transformer": object}),
        ("onnxruntime", {"SessionOptions": object}),
        ("torchaudio", {}),
        ("torchaudio.compliance", {}),
        ("torchaudio.compliance.kaldi", {}),
    ):
        try:
            __import__(name)
        except ImportError:
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            vars(module).update(attributes)
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)


class Official:
    """A loaded checkpoint, with the codes that its generate methods make on the way to audio."""

    def __init__(self, checkpoint: str) -> None:
        stub_unused_dependencies()
        from qwen_tts import Qwen3TTSModel

        self.model = Qwen3TTSModel.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
        self.kind: str = self.model.model.tts_model_type
        self.samples_per_frame = self.model.model.speech_tokenizer.get_decode_upsample_rate()
        self.codes = torch.empty(0)
        generate = self.model.model.generate

        def keep_codes(*arguments: Any, **options: Any) -> Any:
            result = generate(*arguments, **options)
            self.codes = result[0][0]
            return result

        self.model.model.generate = keep_codes

    def clone_prompt(self, case: Case) -> Any:
        return self.model.create_voice_clone_prompt(
            ref_audio=(reference_audio(), SAMPLE_RATE), ref_text=case.ref_text, x_vector_only_mode=case.ref_text is None
        )

    def say(self, case: Case, options: dict[str, Any], *, max_new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Codes [frames, groups] and the waveform [samples]."""
        prompt: dict[str, Any] = {"text": case.text, "language": case.language}
        prompt |= {"non_streaming_mode": case.non_streaming_mode}
        if case.kind == "custom_voice":
            method = self.model.generate_custom_voice
            prompt |= {"speaker": case.speaker, "instruct": case.instruct}
        elif case.kind == "voice_design":
            method = self.model.generate_voice_design
            prompt |= {"instruct": case.instruct or ""}
        else:
            method = self.model.generate_voice_clone
            prompt |= {"voice_clone_prompt": self.clone_prompt(case)}
        torch.manual_seed(SEED)
        wavs, _ = method(max_new_tokens=max_new_tokens, **prompt, **options)
        return self.codes.numpy().astype(np.int16), wavs[0]

    def reference(self) -> Arrays:
        """What a base checkpoint makes of the reference recording."""
        item = self.clone_prompt(next(case for case in cases_of("base") if case.ref_text))[0]
        codes = item.ref_code.numpy().astype(np.int16)
        return {"reference/codes": codes, "reference/speaker": item.ref_spk_embedding.numpy()}


def record(checkpoint: str, extent: Extent) -> Arrays:
    """Everything to compare with, by name."""
    official = Official(checkpoint)
    arrays = official.reference() if official.kind == "base" else {}
    for case in cases_of(official.kind):
        for decoding, options in DECODINGS.items():
            codes, wav = official.say(case, dict(options), max_new_tokens=extent.max_new_tokens)
            key = case_key(case, decoding)
            arrays[f"codes/{key}"] = codes
            if decoding == WAV_DECODING:
                arrays[f"wav/{key}"] = wav[: extent.wav_frames * official.samples_per_frame].astype(np.float32)
    return arrays


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("out")
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--wav-frames", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    extent = Extent(options.max_new_tokens, options.wav_frames)
    np.savez_compressed(options.out, **record(options.checkpoint, extent))


if __name__ == "__main__":
    main()
