"""CUDA graphs, ahead-of-time compilation of Triton kernels, and GPU capabilities."""
