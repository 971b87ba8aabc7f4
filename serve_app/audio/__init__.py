"""Formats that clients get, and recordings that they send."""
