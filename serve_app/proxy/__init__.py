"""What HAProxy is told."""
