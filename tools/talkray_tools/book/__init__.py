"""Audiobooks: convert an EPUB, text or Markdown file to one audio file, using batch jobs on a running server."""
