"""WebSockets of all dialects, and the sessions that speak on them."""
