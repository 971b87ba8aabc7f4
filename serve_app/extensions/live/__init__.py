"""WebSocket sessions, and speech for text that is still being written."""
