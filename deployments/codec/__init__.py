"""Codec decoder, which converts codes to PCM, and codec encoder for reference recordings."""
