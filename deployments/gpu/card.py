"""GPU requirements and number formats, by compute capability, driver, and the CUDA version of PyTorch.

This module uses neither torch nor a GPU, so `talkray doctor` can run its checks first.
"""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Capability = tuple[int, int]

MIB = 1 << 20
# Turing has tensor cores for float16. CUDA 13, which PyTorch's wheels use, does not support older GPUs.
LEAST_CAPABILITY: Capability = (7, 5)
# Ampere has tensor cores for bfloat16 and TF32, which the Triton kernels require.
AMPERE: Capability = (8, 0)
# Minimum driver for each CUDA version, from NVIDIA's table of minor version compatibility
_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
SMALL_BYTES = 24 << 30  # if less than this is free on the GPU, a talker derives its settings from the free memory
_NAMES = {5: "Maxwell", 6: "Pascal", 7: "Volta"}
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, as reported by `nvidia-smi`."""

    name: str
    capability: Capability
    driver: str
    total: int  # bytes
    free: int  # bytes not used by any process

    @staticmethod
    def parse(line: str) -> "Card | None":
        """Parse a line from `nvidia-smi --query-gpu=QUERY --format=csv,noheader,nounits`; None for any other line."""
        fields = [field.strip() for field in line.split(",")]
        try:
            name, capability, driver, total, free = fields
            major, minor = map(int, capability.split("."))
            return Card(name, (major, minor), driver, int(total) * MIB, int(free) * MIB)
        except ValueError:
            return None


QUERY = "name,compute_cap,driver_version,memory.total,memory.free"


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that the driver lists, without loading CUDA."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or len(list(Path("/dev").glob("nvidia[0-9]*")))


def half_precision(capability: Capability) -> Literal["bfloat16", "float16"]:
    """Return the number format for a talker's weights. Turing's tensor cores support only float16."""
    return "bfloat16" if capability >= AMPERE else "float16"


def unsupported_reason(card: Card, cuda: Capability | None) -> str | None:
    """Return why the card cannot run Talkray and how to fix it, or None. `cuda` is PyTorch's CUDA version."""
    if card.capability < LEAST_CAPABILITY:
        family = _NAMES.get(card.capability[0], "too old")
        return (
            f"{card.name} has compute capability {_dotted(card.capability)} ({family}), Talkray requires "
            f"{_dotted(LEAST_CAPABILITY)} (Turing): use another GPU, or the CPU with a --config without num_gpus"
        )
    if cuda is None:
        return (
            f"{card.name} is present, but the installed torch is a CPU build: uninstall it, and install the CUDA "
            "build (see pytorch.org)"
        )
    least = _LEAST_DRIVER.get(cuda[0])
    major = card.driver.partition(".")[0]
    if least is not None and major.isdecimal() and int(major) < least:
        return (
            f"driver {card.driver} of {card.name} is too old for CUDA {_dotted(cuda)} of the installed torch: install "
            f"driver {least} or newer"
        )
    return None


def remark(card: Card) -> str:
    """Return a hint for the card's user, or an empty string."""
    if card.capability < AMPERE:
        return (
            f"; compute capability {_dotted(card.capability)} lacks bfloat16: Talkray runs in float16 with plain "
            "PyTorch instead of its kernels, which is untested"
        )
    return ""


def torch_cuda() -> Capability | None:
    """Return the CUDA version that the installed torch was built for, read from its files; None for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    version = _CUDA.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    return None if version is None else (int(version[1]), int(version[2]))


def _dotted(version: Capability) -> str:
    return ".".join(map(str, version))
