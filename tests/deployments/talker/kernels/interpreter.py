"""Triton's interpreter runs kernels on CPU tensors: TRITON_INTERPRET=1 has to be set before triton is imported."""

from typing import Any

from triton.runtime import interpreter


def accept_numpy_scalars() -> None:
    """Loop bounds are arrays of one element, which NumPy 2.4 no longer turns into an integer by itself."""
    patch = interpreter._patch_lang_tensor

    def patch_and_convert(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_convert
