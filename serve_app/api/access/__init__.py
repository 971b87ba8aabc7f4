"""Access control and limits that are checked before a request's body is read."""
