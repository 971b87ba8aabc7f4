"""Networks of the talker, with the module names of the official checkpoints."""
