"""Execution of batches on the device: prompts, batch state, sampling and captured steps."""
