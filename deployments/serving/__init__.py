"""Ray Serve replicas and the calls between deployments."""
