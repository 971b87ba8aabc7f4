"""Steps of the engine, and scheduling of sequences. Only `startup.py` and `fit.py` use tensors."""
