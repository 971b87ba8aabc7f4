"""The codec decoder for each kind of device: `table.py` names all."""
