"""WebSocket connections of all dialects, and speech sessions on these connections."""
