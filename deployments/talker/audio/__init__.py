"""Samples made on the talker's device: the choice of the codes that the codec decodes in one call."""
