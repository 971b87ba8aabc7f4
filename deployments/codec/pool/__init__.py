"""Streams that share the decoder: whose turn it is, and how many there may be."""
