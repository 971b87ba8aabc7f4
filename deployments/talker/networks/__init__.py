"""The two networks of a step, in PyTorch and in Triton; small ones in C are in embedded_voice/."""
