"""A cluster on one machine, in which every node has its own network, process and mount namespaces."""
