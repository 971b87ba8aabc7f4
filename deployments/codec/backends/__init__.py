"""The codec decoder for each kind of device: `registry.py` names all."""
