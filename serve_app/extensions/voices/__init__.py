"""Stored voices, consents and lexicons."""
