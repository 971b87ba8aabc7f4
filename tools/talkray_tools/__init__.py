"""Command-line tools that ship with the wheel but that replicas do not import."""
