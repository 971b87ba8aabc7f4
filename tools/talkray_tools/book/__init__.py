"""Audiobooks: convert an EPUB, text or Markdown file to one audio file with batch jobs on a running server."""
