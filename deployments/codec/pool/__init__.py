"""Scheduling and admission of streams that share the codec decoder."""
