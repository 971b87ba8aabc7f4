"""Dialogues, and speech that continues in the voice and at the pace of earlier speech."""
