"""Batch jobs that synthesize many texts in the background and store the audio until clients download it."""
