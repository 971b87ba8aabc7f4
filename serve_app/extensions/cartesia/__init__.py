"""Cartesia's API."""
