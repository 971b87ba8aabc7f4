"""From a client's fields to a wish, and from a wish to a request to the replicas."""
