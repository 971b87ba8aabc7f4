"""Notices that clouds give of their machines."""
