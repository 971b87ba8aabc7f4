"""A fleet on one machine: every node has namespaces of its own for network, processes and mounts."""
