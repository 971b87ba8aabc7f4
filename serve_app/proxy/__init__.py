"""HAProxy configuration and restarts."""
