"""`make cluster-check`: validate all files of `cluster/` offline against schemas and rules."""
