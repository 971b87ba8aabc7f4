"""Web page at `/`, and the status of the cluster."""
