"""Training recipe of the demo voice: from a licensed teacher to the checkpoint that ships with Talkray."""
