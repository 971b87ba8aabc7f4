"""The choice of a model by voice, recording or task."""
