"""The code of replicas, and the messages between them."""
