"""The web page at `/`, and `GET /status`."""
