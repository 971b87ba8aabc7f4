"""Compatibility with the text-to-speech API of Alibaba's DashScope."""
