"""What a client sent over HTTP: bodies, forms, JSON."""
