"""Stored voices: the records, the store that keeps the records, and the voice library of an ingress replica."""
