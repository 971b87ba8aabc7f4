"""The voice that needs no download: its packed checkpoint, and the English that it has learnt to read."""
