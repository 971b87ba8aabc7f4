"""Talkray's native WebSocket, and streams of codec frames."""
