"""Compatibility with ElevenLabs' text-to-speech API."""
