"""What runs on a replica, and the protocol between replicas."""
