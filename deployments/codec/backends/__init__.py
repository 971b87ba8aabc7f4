"""Backends of the codec decoder for each kind of device. `registry.py` lists the backends."""
