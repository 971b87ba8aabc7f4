"""The two networks of a step, three times: in PyTorch, in Triton's kernels, in kernels for CPUs."""
