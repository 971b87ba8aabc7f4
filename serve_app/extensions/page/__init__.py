"""The web page, /docs and the status of the cluster."""
