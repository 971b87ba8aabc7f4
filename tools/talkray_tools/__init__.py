"""Command-line tools that ship with the wheel but are not imported by replicas."""
