"""`talkray plan`: replicas and nodes for a load, from measurements, with a configuration file for it."""
