"""Alibaba's DashScope API."""
