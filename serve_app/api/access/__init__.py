"""Who may ask, and how much: the checks before a body is read."""
