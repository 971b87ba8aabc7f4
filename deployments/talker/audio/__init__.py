"""Samples made beside the talker: which codes the codec decodes in one call."""
