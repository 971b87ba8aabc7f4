"""Replicas as Ray Serve sees them, and the calls between them."""
