"""`talkray report`: assess whether this machine can serve a checkpoint, and write the results to a folder."""
