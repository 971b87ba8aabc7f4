"""HTTP API: access control, request parsing, and responses."""
