"""Garbage collection settings for processes that serve streams."""

import gc


def freeze_loaded() -> None:
    """Exclude all existing objects from later garbage collections, which would pause audio for 0.1 s.

    Forked processes also keep sharing the memory of these objects.
    """
    gc.collect()
    gc.freeze()
