"""Prompts that replicas made from recordings for cloning. Later requests contain the prompt instead of the samples.

`recordings.py` decodes recordings. It is loaded with the first one.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deployments.protocol import ClonePrompt, Reference
from deployments.recording_cache import RecordingCache

Preparation = Literal["auto", "none"]  # processing of a recording before it is cloned
Decode = Callable[[bytes, str], tuple[NDArray[np.float32], int]]  # signature of `decode_file`
PREPARE_REFERENCE = "serve_app.audio.recordings:prepare_reference"
# Prompts of recordings. Holds 2,700 prompts of ten seconds each.
PROMPTS: RecordingCache[ClonePrompt] = RecordingCache(max_bytes=32 << 20)


def with_prompt(reference: Reference) -> Reference:
    """Replace the samples of `reference` with its prompt, if the prompt is known and complete for this request."""
    return reference.with_prompt(None if reference.prompt is not None else PROMPTS.find(reference.key))


def store_clone_prompt(reference: Reference, prompt: ClonePrompt) -> None:
    """Store a replica's prompt for a recording. The first prompt with codes is kept, so clones stay the same."""
    known = PROMPTS.find(reference.key)
    if known is None or known.codes is None:
        codes = None if prompt.codes is None else prompt.codes.copy()
        PROMPTS.put(reference.key, ClonePrompt(prompt.speaker.copy(), codes))  # a view would keep the whole message
