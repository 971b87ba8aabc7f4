"""`talkray report`: assess whether this machine can serve a checkpoint, and write a folder of files."""
