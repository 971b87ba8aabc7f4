"""Quiet and runaway speech, found in samples; results of recordings that are kept."""
