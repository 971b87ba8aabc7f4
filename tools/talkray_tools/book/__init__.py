"""Audiobooks: convert an EPUB, text or Markdown file to one audio file through a running server's batch jobs."""
