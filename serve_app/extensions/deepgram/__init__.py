"""Deepgram's API."""
