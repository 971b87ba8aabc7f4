"""Replicas of the talker and codec pools, and the messages between them."""
