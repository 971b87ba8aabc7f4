"""`talkray plan`: compute replicas and nodes for a load from measurements, and write a configuration file."""
