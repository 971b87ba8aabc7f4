"""Triton kernels for decoding steps, which match plain PyTorch. They are imported only if Triton is installed."""
