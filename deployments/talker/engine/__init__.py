"""What the engine does in a step, and for which sequences. No tensors but in `startup.py` and `fit.py`."""
