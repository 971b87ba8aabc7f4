"""The voice that needs no download: its packed checkpoint, kernels for CPUs, the English that it has learnt to read."""
