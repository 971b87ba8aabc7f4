"""The talker's networks, with the module names of the official checkpoints."""
