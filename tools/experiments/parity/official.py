"""Run the official package on one checkpoint, and write its results to an .npz file.

Runs in the environment of the official package:
`.parity/bin/python -m tools.experiments.parity.official CHECKPOINT OUT.npz`.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from talkray_tools.official import OfficialModel
from tools.experiments.parity.cases import (
    DECODINGS,
    EXTENTS,
    SAMPLE_RATE,
    SEED,
    VOICE_TEXTS,
    WAV_DECODING,
    Extent,
    ParityCase,
    case_key,
    cases_of,
    reference_audio,
)

Arrays = dict[str, np.ndarray]


def clone_prompt(official: OfficialModel, case: ParityCase) -> Any:
    return official.package.create_voice_clone_prompt(
        ref_audio=(reference_audio(), SAMPLE_RATE), ref_text=case.ref_text, x_vector_only_mode=case.ref_text is None
    )


def arguments(official: OfficialModel, case: ParityCase) -> dict[str, Any]:
    common = {"text": case.text, "language": case.language, "non_streaming_mode": case.non_streaming_mode}
    if case.kind == "custom_voice":
        return common | {"speaker": case.speaker, "instruct": case.instruct}
    if case.kind == "voice_design":
        return common | {"instruct": case.instruct or ""}
    return common | {"voice_clone_prompt": clone_prompt(official, case)}


def record_reference(official: OfficialModel) -> Arrays:
    """Return the base checkpoint's features of the reference recording."""
    item = clone_prompt(official, next(case for case in cases_of("base") if case.ref_text))[0]
    codes = item.ref_code.numpy().astype(np.int16)
    return {"reference/codes": codes, "reference/speaker": item.ref_spk_embedding.numpy()}


def record_prompts(official: OfficialModel, recordings: Path) -> Arrays:
    """Return the base checkpoint's prompt for each file of a folder, with and without its transcript."""
    arrays: Arrays = {}
    for file in sorted(recordings.iterdir()):
        for way, text in VOICE_TEXTS.items():
            item = official.package.create_voice_clone_prompt(
                ref_audio=str(file), ref_text=text, x_vector_only_mode=text is None
            )[0]
            arrays[f"prompt/{file.stem} {way}/speaker"] = item.ref_spk_embedding.numpy()
            if item.ref_code is not None:
                arrays[f"prompt/{file.stem} {way}/codes"] = item.ref_code.numpy().astype(np.int16)
    return arrays


def record(checkpoint: str, extent: Extent, recordings: Path | None) -> Arrays:
    """Return all values to compare, by name."""
    official = OfficialModel(checkpoint)
    arrays = record_reference(official) if official.kind == "base" else {}
    if recordings is not None:
        arrays |= record_prompts(official, recordings)
    for case in cases_of(official.kind, extent):
        prompt = arguments(official, case)
        for decoding in extent.decodings:
            torch.manual_seed(SEED)
            codes, wav = official.say(max_new_tokens=extent.max_new_tokens, **prompt, **DECODINGS[decoding])
            key = case_key(case, decoding)
            arrays[f"codes/{key}"] = codes
            if decoding == WAV_DECODING:
                arrays[f"wav/{key}"] = wav[: extent.wav_frames * official.frame_samples].astype(np.float32)
    return arrays


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("out")
    parser.add_argument("--extent", choices=EXTENTS, required=True)
    parser.add_argument("--recordings", type=Path, help="folder of recordings from which to make prompts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    np.savez_compressed(options.out, **record(options.checkpoint, EXTENTS[options.extent], options.recordings))


if __name__ == "__main__":
    main()
