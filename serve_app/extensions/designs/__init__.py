"""Voices that clients describe, and keep."""
