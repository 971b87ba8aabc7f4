"""Measuring and tuning the talker's kernels, from a checkout."""
