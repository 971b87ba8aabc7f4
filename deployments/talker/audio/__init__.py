"""Audio decoding on the talker's device, and scheduling of its codec calls."""
