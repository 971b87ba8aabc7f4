"""Stored voices: the records, the store that keeps them, and an ingress replica's voice library."""
