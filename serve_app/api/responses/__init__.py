"""HTTP responses with streamed or complete audio."""
