"""What is kept of each request: a line, counts by key, spans."""
