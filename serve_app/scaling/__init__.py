"""Autoscaling policies of the pools, and monitoring of the pool sizes."""
