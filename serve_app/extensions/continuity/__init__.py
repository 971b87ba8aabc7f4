"""Dialogues, and speech that continues the voice and pace of earlier speech."""
