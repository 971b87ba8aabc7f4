"""Deepgram's API, Aura and Flux."""
