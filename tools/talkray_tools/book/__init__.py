"""Audiobooks: turn an EPUB, text or Markdown file into one audio file, with the jobs of a running server."""
