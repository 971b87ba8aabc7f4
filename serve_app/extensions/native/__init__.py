"""Talkray's own WebSocket, and codec frames."""
