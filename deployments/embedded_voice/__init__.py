"""Embedded voice, which needs no download: its packed checkpoint, kernels for CPUs, and text normalization."""
