"""Access and limits: the checks before a body is read."""
