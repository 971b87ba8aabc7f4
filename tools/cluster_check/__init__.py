"""`make cluster-check`: all of `cluster/` by the schemas and rules of those who read it, without a network."""
