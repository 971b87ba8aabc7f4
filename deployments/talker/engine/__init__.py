"""The steps of the engine, and the choice of their sequences. No tensors but in `startup.py` and `fit.py`."""
