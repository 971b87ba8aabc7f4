"""Answers over HTTP: speech that is streamed, or sent whole."""
