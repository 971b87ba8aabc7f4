"""Routes of our own, which no vendor has: jobs, stored voices, the design of a voice."""
