"""Choosing among several models."""
