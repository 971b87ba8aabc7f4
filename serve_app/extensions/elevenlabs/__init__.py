"""Compatibility with the text-to-speech API of ElevenLabs."""
