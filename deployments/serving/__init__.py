"""Ray Serve replicas, and calls between deployments."""
