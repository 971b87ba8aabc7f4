"""Batch jobs that synthesize many texts in the background, and their pool."""
