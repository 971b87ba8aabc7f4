"""Records of each request: a line, counts by key, spans."""
