"""Servers, clients and request samples of each dialect, shared by tests and experiments."""
