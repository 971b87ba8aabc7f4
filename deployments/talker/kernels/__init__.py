"""Triton kernels of decoding steps, which match plain PyTorch. Only installations with Triton import the kernels."""
