"""Selects one of several models for each request."""
