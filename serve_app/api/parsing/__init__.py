"""Client input over HTTP: bodies, forms, JSON."""
