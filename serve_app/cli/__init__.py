"""Command line interface, `talkray`."""
