"""Compatibility with the text-to-speech API of DashScope, an Alibaba service."""
