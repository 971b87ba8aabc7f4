"""Compatibility with Cartesia's text-to-speech API."""
