"""Talker and code predictor in PyTorch and in Triton. Small networks in C are in embedded_voice/."""
