"""Compatibility with the APIs of other speech servers."""
