"""Cloud nodes: termination notices, and fallback from spot to on-demand instances."""
