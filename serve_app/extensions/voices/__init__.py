"""Voices that stay: their records, the store that holds them, and what an ingress replica knows of it."""
