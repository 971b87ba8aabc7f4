"""Compatibility with OpenAI's Realtime API."""
