"""Autoscaling policies of the pools, and a watch on their sizes."""
