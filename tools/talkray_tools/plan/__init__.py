"""`talkray plan`: compute the replicas and nodes that a load needs, and write a configuration file."""
