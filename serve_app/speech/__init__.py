"""Synthesis of one utterance: admission, segments, and word timestamps."""
