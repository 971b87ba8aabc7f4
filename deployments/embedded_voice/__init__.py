"""Embedded voice, which needs no download: its packed checkpoint, CPU kernels, and text normalization."""
