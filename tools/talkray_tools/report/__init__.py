"""`talkray report`: whether a checkpoint may be served here, as one folder to read, to compare and to send."""
