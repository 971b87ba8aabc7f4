"""State of running sequences on the host and on the device, including the KV cache."""
