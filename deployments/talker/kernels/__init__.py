"""Kernels of the decode loop, equal to plain PyTorch: Triton's, imported only if Triton exists, and C's for CPUs."""
