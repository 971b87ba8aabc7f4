"""Voices from a description."""
