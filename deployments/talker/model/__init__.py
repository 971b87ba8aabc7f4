"""The talker's networks, whose module names match the official checkpoints."""
