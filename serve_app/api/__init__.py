"""The HTTP surface: access control, the meaning of requests, and their responses."""
