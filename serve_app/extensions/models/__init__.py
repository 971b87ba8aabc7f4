"""Selection of one of several models for each request."""
