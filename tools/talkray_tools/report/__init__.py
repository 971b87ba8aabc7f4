"""`talkray report`: whether a checkpoint is fit to serve here, as a folder to read, compare and send."""
