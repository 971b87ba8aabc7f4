"""Compatibility with Deepgram's text-to-speech API."""
