"""The `talkray` command."""
