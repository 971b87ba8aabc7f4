"""Converts the sent text to the spoken text: markup, SSML, lexicons and text normalization."""
