"""Triton kernels of the decode loop, each beside the plain PyTorch it has to equal. Imported only where Triton is."""
