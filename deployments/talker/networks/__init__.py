"""The two networks of a step, in PyTorch, in Triton and in C."""
