"""Audio formats of responses, and recordings sent by clients."""
