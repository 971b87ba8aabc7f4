"""The configuration of HAProxy."""
