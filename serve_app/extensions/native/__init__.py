"""Talkray's own WebSocket, and streams of codec frames."""
