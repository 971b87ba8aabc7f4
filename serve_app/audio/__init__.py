"""Audio formats of responses, and recordings that clients send."""
