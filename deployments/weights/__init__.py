"""Lookup, download, validation and reading of checkpoints."""
