"""Access control, and the limits checked before a request body is read."""
