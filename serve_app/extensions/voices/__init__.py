"""Stored voices: their records, the store that holds them, and the library of an ingress replica."""
