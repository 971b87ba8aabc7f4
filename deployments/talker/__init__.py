"""The talker, which converts text to codec frames on a GPU or a CPU."""
