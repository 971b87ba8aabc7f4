"""WebSocket connections for all dialects, and the speech sessions on them."""
