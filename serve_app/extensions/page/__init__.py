"""Web page at `/`, and the cluster's status."""
