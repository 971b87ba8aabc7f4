"""Policies of the pools, and a watch on the sizes of the pools."""
