"""A log line per request, usage counts and traces."""
