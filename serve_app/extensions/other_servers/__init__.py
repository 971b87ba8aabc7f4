"""The APIs of other speech servers."""
