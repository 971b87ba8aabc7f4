"""Requirements of a GPU and its number format, by compute capability, driver and the CUDA of PyTorch. Knows
neither torch nor a GPU, so that `talkray doctor` can ask before either is loaded.
"""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Capability = tuple[int, int]

MIB = 1 << 20
# Tensor cores for float16 (Turing). CUDA 13, which PyTorch's wheels are built with, has no kernels for less.
LEAST_CAPABILITY: Capability = (7, 5)
# Matrix units for bfloat16 and TF32 (Ampere), which our Triton kernels are written for.
AMPERE: Capability = (8, 0)
# The least driver of each CUDA: NVIDIA's table of minor version compatibility.
_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
SMALL_BYTES = 24 << 30  # of free memory: on a GPU with less a talker's settings follow from what it carries
_NAMES = {5: "Maxwell", 6: "Pascal", 7: "Volta"}
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, as reported by `nvidia-smi`."""

    name: str
    capability: Capability
    driver: str
    total: int  # bytes
    free: int  # bytes that no process has

    @staticmethod
    def parse(line: str) -> "Card | None":
        """From a line of `nvidia-smi --query-gpu=QUERY --format=csv,noheader,nounits`; None for any other line."""
        fields = [field.strip() for field in line.split(",")]
        try:
            name, capability, driver, total, free = fields
            major, minor = map(int, capability.split("."))
            return Card(name, (major, minor), driver, int(total) * MIB, int(free) * MIB)
        except ValueError:
            return None


QUERY = "name,compute_cap,driver_version,memory.total,memory.free"


def half_precision(capability: Capability) -> Literal["bfloat16", "float16"]:
    """The type of a talker's weights. Turing multiplies float16 only."""
    return "bfloat16" if capability >= AMPERE else "float16"


def why_not(card: Card, cuda: Capability | None) -> str | None:
    """Why a card cannot serve anything, and the remedy; None if it can. `cuda` is PyTorch's."""
    if card.capability < LEAST_CAPABILITY:
        family = _NAMES.get(card.capability[0], "too old")
        return (
            f"{card.name} has compute capability {_dotted(card.capability)} ({family}), the least is "
            f"{_dotted(LEAST_CAPABILITY)} (Turing): another GPU, or the CPU with a --config without num_gpus"
        )
    if cuda is None:
        return (
            f"{card.name} is here, and the installed torch is one for CPUs: uninstall it, and install the build for "
            "CUDA as pytorch.org says"
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
    """A hint for the user of the card, or nothing."""
    if card.capability < AMPERE:
        return (
            f"; compute capability {_dotted(card.capability)} has no bfloat16: float16 in plain PyTorch, without our "
            "kernels, and untested"
        )
    return ""


def torch_cuda() -> Capability | None:
    """The CUDA that the installed torch was built with, read from its files; None without one."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    version = _CUDA.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    return None if version is None else (int(version[1]), int(version[2]))


def _dotted(version: Capability) -> str:
    return ".".join(map(str, version))
