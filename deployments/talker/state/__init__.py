"""State of a running sequence: on the host, its row of tensors, its keys and values, and its sampling."""
