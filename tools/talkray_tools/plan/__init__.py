"""`talkray plan`: what a load needs, from what was measured, with a configuration file for it."""
