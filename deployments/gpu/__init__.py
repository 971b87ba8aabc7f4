"""Graphs, kernels that are compiled ahead, and how both are launched."""
