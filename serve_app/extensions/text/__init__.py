"""Markup, SSML, lexicons, and numbers as words."""
