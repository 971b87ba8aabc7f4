"""Talkray's application: composition, config, HTTP and WebSocket APIs, and command line."""
