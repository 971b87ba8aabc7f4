"""What runs: a sequence on the host, its row of tensors, its keys and values, how its codes are sampled."""
