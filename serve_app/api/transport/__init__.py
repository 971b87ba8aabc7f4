"""HTTP and WebSockets as uvicorn speaks them, bounded."""
