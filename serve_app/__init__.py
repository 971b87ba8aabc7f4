"""The application around the replicas: composition, config, HTTP and WebSocket surface, command line."""
