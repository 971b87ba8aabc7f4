"""Measure and tune the talker's kernels from a checkout."""
