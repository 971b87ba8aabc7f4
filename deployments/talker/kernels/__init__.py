"""Kernels of the decode loop, equal to plain PyTorch: Triton's, imported only where Triton is, and C's for CPUs."""
