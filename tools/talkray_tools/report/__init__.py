"""`talkray report`: assess whether a checkpoint is fit to serve on this machine, as a folder of files."""
