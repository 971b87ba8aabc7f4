"""Messages between a replica and its decoder processes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deployments.protocol import Codes

FORK = b"f"  # goes with the socket of a new worker

SharedOutcome = tuple[NDArray[np.int16], int] | Exception  # audio and the position behind it, or the error


@dataclass(frozen=True, slots=True)
class SharedJob:
    """A DecodeJob whose state lies in shared memory, and where the one behind it shall be written."""

    codes: Codes
    position: int
    source: int | None  # slot; None at a stream's beginning
    target: int
    silent: bool
    followed_by: int


@dataclass(frozen=True, slots=True)
class SharedOutcomes:
    """Of the jobs of a call, in their order."""

    outcomes: list[SharedOutcome]
    repaired: int  # calls of a stream that were made again in float32


@dataclass(frozen=True, slots=True)
class DecoderChoice:
    """The decoder to load, and the shapes of its calls."""

    directory: str
    precision: str
    chunk_frames: tuple[int, ...]
    max_call_s: float
