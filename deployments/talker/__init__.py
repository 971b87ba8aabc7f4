"""The talker: text in, codec frames out, on a GPU."""
