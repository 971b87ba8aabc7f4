"""Texts as they are read: markup, SSML, lexicons, figures."""
