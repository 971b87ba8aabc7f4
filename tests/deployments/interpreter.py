"""Triton's interpreter runs kernels on CPU tensors: TRITON_INTERPRET=1 has to be set before triton is imported."""

import os
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def accept_numpy_scalars() -> None:
    """Loop bounds are arrays of one element, which NumPy 2.4 no longer turns into an integer by itself."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_convert(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_convert
