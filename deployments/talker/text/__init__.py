"""Tokenization of text, and construction of prompts."""
