"""Streams that share the decoder: their order, and how many there may be."""
