"""Which checkpoint `auto` means on this machine."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

EMBEDDED = "embedded"

# In the order of preference.
RELEASED = (
    "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
    "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice",
    "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign",
    "Qwen/Qwen3-TTS-12Hz-1.7B-Base",
    "Qwen/Qwen3-TTS-12Hz-0.6B-Base",
)


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A concrete model, and why it is this one."""

    model: str
    reason: str


def choose(model: str, *, models_dir: Path | None, gpu: bool) -> ModelChoice:
    """Resolve `auto`; any other name is taken as it is."""
    if model != "auto":
        return ModelChoice(model, "asked for")
    if not gpu:
        return ModelChoice(EMBEDDED, "no GPU here: the embedded checkpoint keeps up with real time on a CPU")
    for name in RELEASED:
        local = None if models_dir is None else models_dir / name.split("/")[1]
        if local is not None and (local / "config.json").exists():
            return ModelChoice(str(local), f"found in {models_dir}")
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return ModelChoice(name, "found in the Hugging Face cache")
    return ModelChoice(
        EMBEDDED, "no released checkpoint in the Hugging Face cache: name one with --model to download it"
    )
