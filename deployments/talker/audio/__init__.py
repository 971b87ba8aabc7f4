"""Audio decoding on the talker's device, and the scheduling of its codec calls."""
