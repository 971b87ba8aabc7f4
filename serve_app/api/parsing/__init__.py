"""Parsing of HTTP bodies, forms and JSON."""
