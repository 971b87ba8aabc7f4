"""Voices that clients design from a description and store."""
