"""Codec decoder backends for each kind of device. `registry.py` lists them."""
